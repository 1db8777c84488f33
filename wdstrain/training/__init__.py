"""Train models of torchvision, or the user's own, on shards.

train, evaluate, export                      train; evaluate and predict; export
validation, compare                          a pass over samples without learning; runs side by side
options, config                              what these take, and the checks of it
run, data, state                             a run: its shards, model, position, sums and callbacks
inputs                                       inputs of the model
tasks, heads, metrics                        labels, outputs of the model, losses, and scores
models, weights, optim                       models by name, weights, trained models, optimizers
distributed, fsdp                            the processes of a run, and signals
run_dir, run_log, report, words              the folder of a run, its checkpoints, logs, page, text
"""
