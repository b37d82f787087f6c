"""Data, from files to micro-batches.

    places --rows--> rows --forms--> content --encode--> token ids and targets --prepare--> memory-mapped samples --batches--> Micro

`source` says where a job's rows come from, `places` finds files and hub data sets, `rows` reads them (`lines` those of JSON and text, `sheets` CSV,
`tables` Parquet and Arrow; `arrays` takes JSON arrays apart, `opened` decompresses, `problems` gathers what is wrong); `forms`, `turns` and `tools`
judge a row and say what its content is, under our `names`; `chat` renders it (`spans` finds the turns, `shown` what was left out) and `tokens` cuts
it, which says what is trained; `prepare` does it once per job (`split` says which rows are held out, `workers` tokenise, `tally` counts by source),
`samples` is what every rank maps, and `batches` is a pure function of (seed, rows consumed), which `order` puts into rows and `share` among ranks.
"""
