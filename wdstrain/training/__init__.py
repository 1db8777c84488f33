"""Train models of torchvision, or the user's own, on shards.

api, inference, export                       train and evaluate, predict, export
arguments, options, config                   what these take, and the checks of it
checked_run, data                            a run before it starts: its shards, model and loaders
inputs, sources, field_source, transform_source   inputs of the model
tasks, heads, mask_head                      labels, outputs of the model, and losses
models, weights, optim                       models by name, weights to start from, optimizers
trainer, train_step, run_state, epoch_sums   the loop: epochs, one step, and what checkpoints hold
evaluation, metrics, head_metrics, previews  one pass without learning
distributed, fsdp                            the processes of a run
stop_signals, callbacks                      signals, and code of the user's during a run
checkpoint, loaded_checkpoint                atomic checkpoints; a trained model
run_dir, run_logger, epoch_report, report    the files of a run, and the text about it
prediction_table                             files of predictions
"""
