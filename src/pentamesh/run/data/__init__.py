"""Data, from files to micro-batches.

    files on disk --rows--> checked rows --encode--> token ids and targets --prepare--> memory-mapped samples --batches--> Micro

`rows` reads and `forms` judges, `chat` and `tokens` say what is trained, `prepare` does it once per job, `samples` is what every rank maps,
and `batches` is a pure function of (seed, samples consumed).
"""
