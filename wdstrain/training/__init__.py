"""Train models of torchvision, or the user's own, on shards.

train, evaluate                     train; evaluate and predict
validation                          a pass over samples without learning, and sums of an epoch
options, config                     what these take, and the checks of it
run, data                           a run: its shards, model, position and checkpoints
inputs                              inputs of the model
tasks, heads, metrics               labels, outputs of the model, losses, and scores
models, weights                     models by name, optimizers, weights, trained models, export
distributed                         the processes of a run, and signals
run_log, report                     the folder of a run, its logs and its page; runs compared
"""
