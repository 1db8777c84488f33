"""Train models of torchvision, or the user's own, on shards.

api.py            train, evaluate                            options.py       every option, by purpose
arguments.py      arguments of the public functions          config.py        checked options, from flags or files
checkpoint_options.py  options of evaluate and predict       option_rules.py  values that options may have
tasks.py          what is learned, from the index's labels   label_counts.py  samples per class, mean of numbers
models.py         a model by name; weights, the last layer   optim.py         optimizers, learning rate, EMA
trainer.py        epochs of training and validation          evaluation.py    one pass without learning
epoch_sums.py     sums over one epoch of training            metrics.py       metrics of a pass
timing.py         seconds of each stage of a step            distributed.py   the processes of a run
stop_signals.py   Ctrl-C and the signals of schedulers       run_dir.py       the folder of a run
checkpoint.py     atomic checkpoints                         run_logger.py    writes all files of a run
previews.py       some predictions with their images         tensorboard_logger.py
report.py         report.html                                loaded_checkpoint.py  a trained model
inference.py      predictions as a table                     export.py        models for other programs
grad_checkpointing.py  less memory, the same results
progress.py       progress for the terminal or a notebook
"""
