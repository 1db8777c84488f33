# %% [markdown]
# # A data set, from pictures to a trained network
#
# This file is a notebook and a script. VS Code, PyCharm and Spyder open it as cells; for Jupyter:
# `jupytext --to ipynb scripts/notebook.py`. As a script, `.venv/bin/python scripts/notebook.py`, it says the same in text; it takes about half a
# minute on two slow cores. It needs what the demo needs, `pip install 'wdstrain[demo]'`, and no network, and it writes to `shards/notebook`
# in the folder where it runs.

# %%
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn

import wdstrain as wt
from wdstrain.report import charts

# what a notebook does with the last line of a cell, anywhere in it
display = import_module("IPython.display").display if find_spec("IPython") else print

folder = Path("shards/notebook")
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% [markdown]
# ## Pictures become shards
#
# The pictures are the 1 797 handwritten digits that scikit-learn ships. They are written as a tree of class folders, `digits/seven/0042.png`: what
# many data sets look like before they are packed.

# %%
names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
digits = load_digits()
for number, (pixels, target) in enumerate(zip(digits.images, digits.target, strict=True)):
    path = folder / "digits" / names[target] / f"{number:04d}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((pixels * 255 / 16).astype(np.uint8)).save(path)
print(path, pixels.shape)

# %% [markdown]
# Packing is done once. The shards are plain tars, shuffled by a hash of each key, and an index beside them says what lies where. The shell does
# the same with `wdstrain convert folder`.

# %%
shards, split = str(folder / "shards"), {"train": 0.8, "val": 0.2}
index = wt.convert_folder(
    str(folder / "digits"),
    shards,
    split=split,
    stratify="label",
    max_shard_samples=400,
    num_workers=1,
    overwrite=True,
)
display(index)

# %% [markdown]
# ## What is in there
#
# `wt.info` says what shards hold, also shards that somebody else made, and on a server.

# %%
display(wt.info(shards))

# %% [markdown]
# `wt.peek` decodes a few samples and shows them: the first, some at random, or as many of each class.

# %%
train = f"{shards}/train-*.tar"
display(wt.peek(train))

# %%
display(wt.peek(train, 10, order="classes"))

# %%
display(wt.peek(train, 3, classes=["three", "eight"], order="random", seed=1))

# %% [markdown]
# ## A loader
#
# Fields say what becomes of a sample's parts. Nothing is read before the first batch is asked for.

# %%
fields = {"image": wt.image(size=16, augment="trivialaugment"), "label": wt.label()}
loader = wt.Loader(train, fields, batch_size=32, seed=1)
display(loader)

# %% [markdown]
# To look at a loader shows what it will give, after augmentation, and moves it by nothing.

# %%
display(wt.peek(loader))

# %% [markdown]
# A batch is a dict of tensors. Its memory is not reused while you hold a reference.

# %%
batch = next(iter(loader))
print({name: list(batch[name].shape) for name in fields}, batch["__key__"][:2])
classes = index.labels[0].classes  # a batch knows their numbers alone
display(wt.peek(batch, 3, classes=classes))

# %% [markdown]
# ## A training loop of one's own
#
# Every `for` over the loader is the next epoch, in another order. `wt.to_device` does nothing of note on a processor; to a GPU it copies the next batch
# while the loop works on this one. This cell can be interrupted and run again at any time: threads and processes end with their loader.


# %%
def small() -> nn.Module:
    """Two convolutions: 16x16 pictures to ten numbers."""
    layers = [
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    ]
    return nn.Sequential(*layers).to(device)


model = small()
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
losses: list[float] = []
for epoch in range(4):
    for batch in wt.to_device(loader.epoch(epoch), device):
        loss = nn.functional.cross_entropy(model(batch["image"] / 255), batch["label"])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
print(f"{len(losses)} steps, loss {losses[0]:.2f} -> {np.mean(losses[-20:]):.2f}")

# %% [markdown]
# What did the last epoch cost, and what held it back? With so small a network it may well be the loader; the report says so, and what would help.

# %%
display(loader.report())

# %% [markdown]
# ## Curves
#
# matplotlib draws them if it is installed; otherwise they are drawn as the package's own reports are.


# %%
class Curves:
    """Lines over one axis, as a notebook shows them and in words."""

    def __init__(self, title: str, across: str, **lines: list[float]) -> None:
        self.title, self.across, self.lines = title, across, lines

    def __repr__(self) -> str:
        ends = (f"{name} {ys[0]:.3g} ... {ys[-1]:.3g}" for name, ys in self.lines.items())
        return f"{self.title}: {', '.join(ends)}"

    def _repr_html_(self) -> str:
        ends = [(name, range(1, len(ys) + 1), ys) for name, ys in self.lines.items()]
        lines = [charts.Line(*one) for one in ends]
        return charts.fragment(self.title, charts.lines(lines, across=self.across))


def plot(title: str, across: str, **lines: list[float]) -> None:
    if not find_spec("matplotlib"):
        display(Curves(title, across, **lines))
        return
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3))
    for name, ys in lines.items():
        axes.plot(range(1, len(ys) + 1), ys, label=name)
    axes.set(title=title, xlabel=across)
    axes.legend()
    display(figure)
    plt.close(figure)  # or it would be shown twice


smooth = np.convolve(losses, np.ones(20) / 20, "same").tolist()
plot("Loss", "step", each=losses, smooth=smooth[10:-10])

# %% [markdown]
# Validation takes every sample once, in file order: `tail="keep"` gives a short last batch instead of leaving samples out.

# %%
seen = {"image": wt.image(size=16), "label": wt.label()}
val = wt.Loader(f"{shards}/val-*.tar", seen, shuffle=False, tail="keep")


def mistakes(model: nn.Module) -> list[str]:
    """The keys of the samples whose class it does not see."""
    keys: list[str] = []
    with torch.no_grad():
        for batch in wt.to_device(val, device):
            wrong = model(batch["image"] / 255).argmax(1) != batch["label"]
            keys += [batch["__key__"][row] for row in wrong.nonzero().flatten().tolist()]
    return keys


wrong = mistakes(model)
right = 1 - len(wrong) / len(val.index)
print(f"{right:.1%} of {len(val.index)} samples that it never saw are right; these are not:")
display(wt.peek(val.index, keys=wrong[:10]))

# %% [markdown]
# ## Stopping in the middle
#
# A position is an epoch and a step, and nothing else. Another loader that is given it goes on with the very batch that comes next here.

# %%
batches = iter(loader)  # epoch 4 is the next
for _ in range(20):
    next(batches)
state = loader.state_dict()
print(state)

other = wt.Loader(train, fields, batch_size=32, seed=1)
other.load_state_dict(state)
resumed = next(iter(other))
expected = next(batches)
print("the same samples:", resumed["__key__"] == expected["__key__"])
print("the same pixels:", torch.equal(resumed["image"], expected["image"]))
other.close()

# %% [markdown]
# ## Functions from a cell
#
# With `transform` a function of your own makes an example of a sample's bytes; a lambda or a function from a cell will do.

# %%
sizes = wt.Loader(train, transform=lambda sample: {"bytes": len(sample["png"])}, batch_size=500)
batch = next(iter(sizes))
print(f"{batch['bytes'].float().mean():.0f} bytes a picture")
sizes.close()

# %% [markdown]
# `num_workers=0` decodes in threads, and is often enough. Worker processes give the same order. Where they are forked they know the functions
# of a notebook, too; where they are not (macOS, Windows, Linux since Python 3.14), those need a file of their own, and the loader says so.

# %%
processes = wt.Loader(
    train,
    fields,
    batch_size=32,
    seed=1,
    num_workers=2,
    multiprocessing_context="fork",
)
batch = next(iter(processes.epoch(4, start=20)))
print("the same samples:", batch["__key__"] == resumed["__key__"])
print("the same pixels:", torch.equal(batch["image"], resumed["image"]))
processes.close()

# %% [markdown]
# ## Training without a loop of one's own
#
# `wt.train` is `wdstrain train`: checkpoints, metrics, a page of figures, and what was asked for in a file. It trains until it is done, or is interrupted;
# then `resume=True` goes on.

# %%
run = str(folder / "run")
outcome = wt.train(
    shards,
    run,
    epochs=3,
    batch_size=32,
    lr=4e-3,
    image_size=16,
    overwrite=True,
)
print(outcome)

# %%
losses_by_epoch = {
    "training": [epoch["loss"] for epoch in outcome.epochs],
    "validation": [epoch["val"]["loss"] for epoch in outcome.epochs],
}
plot("Loss by epoch", "epoch", **losses_by_epoch)
plot("Accuracy", "epoch", validation=[epoch["val"]["accuracy"] for epoch in outcome.epochs])

# %% [markdown]
# A checkpoint is evaluated on any shards that have its label.

# %%
task, metrics = wt.evaluate(f"{run}/checkpoints/best.pt", f"{shards}/val-*.tar")
print({name: round(value, 4) for name, value in metrics.items()})

# %% [markdown]
# ## Before a long run
#
# `wt.plan_epoch` says what an epoch would do on many GPUs before anything is read: what each reads and holds, and how well it is shuffled.

# %%
display(wt.plan_epoch(train, batch_size=16, world_size=4, shuffle_buffer=200))

# %% [markdown]
# `wt.bench` measures what this machine can do on these data, says what binds, and what a change would give.

# %%
found = wt.bench(train, fields, batch_size=32, seconds=0.2, multiprocessing_context="fork")
display(found)

# %% [markdown]
# What was started ends with its loader: here, or when nobody holds it any more. A notebook holds what a cell ended with, in `Out`, so to close it is surer.

# %%
loader.close()
val.close()

# %% [markdown]
# ## Where to read on
#
# * `README.md`: converting one's own data, shards on a server, mixtures, what is promised, what was measured, limits.
# * `help(wt.Loader)` and the other docstrings: shapes, units, errors. `wdstrain --help`: all of this in a shell.
# * `shards/notebook/run/report.html`: what `wt.train` left to look at.
# * `scripts/examples/lightning_fit.py`, `scripts/examples/keras_fit.py`: the same loader under other trainers.
