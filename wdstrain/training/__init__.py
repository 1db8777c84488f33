"""Train models of torchvision, or the user's own, on shards.

train                               the loop of a run: epochs, steps, validation
run, data                           a run: its shards, model, position and checkpoints
evaluate, predict                   passes without learning; use of a trained model; its export
options, config                     what these take, and the checks of it
inputs                              inputs of the model
tasks, heads, metrics               labels, outputs of the model, losses, and scores
models, checkpoint                  models by name, optimizers, weights, checkpoints
distributed                         the processes of a run, and signals
run_dir, report                     the folder of a run, its logs and its page; runs compared
"""
