"""Training torchvision models, or the user's own, on shards.

configuration.py  every choice, from flags, files or Python      task.py      what is learnt, from the labels of the index
models.py         a model by name; weights, the last layer       metrics.py   how good outputs are
recipe.py         optimisers, learning rate, averages            counting.py  samples of each class
loop.py           epochs of training and validation              tally.py     what is summed over one
scoring.py        how good a model is on a pass                  stages.py    where the seconds of a step go
world.py          the processes of a run                         interruption.py  being asked to stop
run.py            the folder of a run                            checkpoints.py   whole or not at all
keeping.py        what a run leaves behind                       board.py     TensorBoard's events
gallery.py        a few predictions as pictures                  report.py    the page
doors.py          train and evaluate                             opened.py    a trained model, from its checkpoint
predicting.py     predictions to a table                         exporting.py for other programs
telling.py        who is told how it goes on
"""
