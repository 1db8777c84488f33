"""Train models of torchvision, or the user's own, on shards.

api.py            train, evaluate                            options.py       every option, by purpose
arguments.py      arguments of the public functions          config.py        checked options, from flags or files
checked_run.py    a run before it starts                     data.py          sets of shards, loaders of a run
inputs.py         inputs of the model                        sources.py       where they come from
field_source.py   inputs by fields                           transform_source.py  inputs by a transform
tasks.py          what is learned, from the index's labels   heads.py         outputs and loss of each label
models.py         a model by name                            weights.py       weights to start from
optim.py          optimizers, learning rate, EMA             trainer.py       epochs of training and validation
train_step.py     one step of the optimizer                  evaluation.py    one pass without learning
epoch_sums.py     position, sums and seconds of an epoch     epoch_report.py  reports of an epoch
metrics.py        metrics of a pass                          head_metrics.py  metrics of each kind of head
distributed.py    the processes of a run                     fsdp.py          parameters split over processes
stop_signals.py   signals, and when checkpoints are due      callbacks.py     code of the user's during a run
run_state.py      all that a checkpoint holds                checkpoint.py    atomic checkpoints
run_dir.py        the folder of a run                        run_logger.py    writes all files of a run
previews.py       some predictions with their images         report.py        report.html
inference.py      predictions of a checkpoint                prediction_table.py  files of predictions
loaded_checkpoint.py  a trained model                        export.py        models for other programs
mask_head.py      outputs and loss of masks
"""
