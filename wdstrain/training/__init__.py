"""Train models of torchvision, or the user's own, on shards.

train, evaluate, predict, export             train and evaluate, predict, export
arguments, options, config                   what these take, and the checks of it
run, data                                    a run: its shards, model, loaders, position, checkpoints
inputs, sources                              inputs of the model
tasks, heads                                 labels, outputs of the model, and losses
models, weights, optim                       models by name, weights to start from, optimizers
state, metrics, previews                     position and sums of a run; metrics of a pass
distributed, fsdp                            the processes of a run
stop_signals, callbacks                      signals, and code of the user's during a run
checkpoint, loaded_checkpoint                atomic checkpoints; a trained model
run_dir, run_log, epoch_report, report       the files of a run, and the text about it
"""
