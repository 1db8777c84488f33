"""Training torchvision models on shards.

task.py     what is to be learnt, from the labels in the index: loss, metrics, fields of a batch
models.py   a model by name
run.py      the folder of a run: configuration, metrics, checkpoints
loop.py     epochs of training and validation
"""
