# %% [markdown]
# # From images to a trained model
#
# This notebook converts images to WebDataset tar shards, looks at them, and trains a small network on them. It takes about half a minute on two
# cores. It needs no network after the installation, and no GPU. It writes to `shards/notebook` in the current folder.

# %%
# %pip install --quiet "wdstrain[demo]"

# %%
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from skimage import data
from torch import nn
from torchvision.transforms.functional import to_pil_image
from torchvision.utils import make_grid

import wdstrain as wt
from wdstrain.report import charts

# Shows a value like the last line of a cell; prints it when this runs as a script.
display = import_module("IPython.display").display if find_spec("IPython") else print

folder = Path("shards/notebook")
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% [markdown]
# ## Convert images to shards
#
# The images are cuts of ten photographs that scikit-image contains. They are first written as a tree of class folders, such as
# `photos/cat/042.jpg`. Many data sets have this layout.

# %%
photographs = {  # class: function of skimage.data
    "astronaut": "astronaut",
    "bricks": "brick",
    "cat": "chelsea",
    "coffee": "coffee",
    "coins": "coins",
    "galaxies": "hubble_deep_field",
    "grass": "grass",
    "gravel": "gravel",
    "retina": "retina",
    "rocket": "rocket",
}
rng = np.random.default_rng(0)
for name, function in photographs.items():
    photograph = Image.fromarray(getattr(data, function)()).convert("RGB")
    (folder / "photos" / name).mkdir(parents=True, exist_ok=True)
    for number in range(150):
        side = min(photograph.size) * rng.uniform(0.35, 0.7)
        left, top = (rng.uniform(0, length - side) for length in photograph.size)
        cut = photograph.resize((64, 64), box=(left, top, left + side, top + side))
        cut.save(folder / "photos" / name / f"{number:03d}.jpg")
print(sorted(folder.glob("photos/cat/*.jpg"))[0])

# %% [markdown]
# Conversion is done once. The shards are plain tars. Their samples are shuffled by a hash of each key. An index beside them lists where each
# sample is. The shell command is `wdstrain convert folder`.

# %%
shards, split = str(folder / "shards"), {"train": 0.8, "val": 0.2}
index = wt.convert_folder(
    str(folder / "photos"),
    shards,
    split=split,
    stratify="label",
    max_shard_samples=300,
    num_workers=1,
    overwrite=True,
)
display(index)

# %% [markdown]
# ## Look at the shards
#
# `wt.info` describes the contents of shards. It also works on shards without an index, and on a server.

# %%
display(wt.info(shards))

# %% [markdown]
# `wt.peek` decodes a few samples and shows them: the first, random ones, or the same number of each class.

# %%
train = f"{shards}/train-*.tar"
display(wt.peek(train, 5))

# %%
display(wt.peek(train, 10, order="classes"))

# %%
display(wt.peek(train, 2, classes=["cat", "rocket"], order="random", seed=1))

# %% [markdown]
# ## A loader
#
# Fields state what the loader makes of a sample's members. The loader reads nothing before the first batch is requested.

# %%
fields = {"image": wt.image(size=32, augment="trivialaugment"), "label": wt.label()}
loader = wt.Loader(train, fields, batch_size=32, seed=1)
display(loader)

# %% [markdown]
# A batch is a dict of tensors. Its memory is not reused while you hold a reference. Its images are shown after augmentation.

# %%
batch = next(iter(loader))
print({name: list(batch[name].shape) for name in fields}, batch["__key__"][:2])
classes = index.labels[0].classes  # a batch holds class numbers only
print([classes[number] for number in batch["label"][:8]])
display(to_pil_image(make_grid(batch["image"][:8])))

# %% [markdown]
# ## A training loop
#
# Every `for` over the loader is the next epoch, in another order. On a GPU, `wt.to_device` copies the next batch while the loop works on this one.
# This cell can be interrupted and run again at any time: threads and processes end with their loader.


# %%
def small() -> nn.Module:
    """Return a network of two convolutions for 32x32 images and ten classes."""
    layers = [
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 8 * 8, 10),
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
# The report of the last epoch names the bottleneck. The network is so small that the loader may be the bottleneck.

# %%
print(loader.report()["verdict"])

# %% [markdown]
# ## Curves
#
# matplotlib draws the curves if it is installed. Otherwise the charts of the package's own reports are used.


# %%
class Curves:
    """Line chart with a text form."""

    def __init__(self, title: str, across: str, **lines: list[float]) -> None:
        self.title, self.across, self.lines = title, across, lines

    def __repr__(self) -> str:
        ends = (f"{name} {ys[0]:.3g} ... {ys[-1]:.3g}" for name, ys in self.lines.items())
        return f"{self.title}: {', '.join(ends)}"

    def _repr_html_(self) -> str:
        ends = [(name, range(1, len(ys) + 1), ys) for name, ys in self.lines.items()]
        lines = [charts.Line(*end) for end in ends]
        return f"<b>{self.title}</b>{charts.lines(lines, across=self.across)}"


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
    plt.close(figure)  # an open figure is shown again


smooth = np.convolve(losses, np.ones(20) / 20, "same").tolist()
plot("Loss", "step", each=losses, smooth=smooth[10:-10])

# %% [markdown]
# Validation takes every sample once, in file order. With `tail="keep"` the last batch is short, and no sample is left out.

# %%
seen = {"image": wt.image(size=32), "label": wt.label()}
val = wt.Loader(f"{shards}/val-*.tar", seen, shuffle=False, tail="keep")


def mistakes(model: nn.Module) -> list[str]:
    """Return the keys of the samples that are predicted wrong."""
    keys: list[str] = []
    with torch.no_grad():
        for batch in wt.to_device(val, device):
            wrong = model(batch["image"] / 255).argmax(1) != batch["label"]
            keys += [batch["__key__"][row] for row in wrong.nonzero().flatten().tolist()]
    return keys


wrong = mistakes(model)
right = 1 - len(wrong) / len(val.index)
print(f"accuracy {right:.1%} on {len(val.index)} validation samples; wrong predictions:")
display(wt.peek(val.index.where(f"key in {wrong[:5]}")))

# %% [markdown]
# ## Stop and resume
#
# A position is an epoch and a step. A second loader that gets this position continues with the same batch as the first.

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
# ## Your own functions
#
# `transform` makes an example from the bytes of a sample. It may be a lambda or a function of this notebook.

# %%
sizes = wt.Loader(train, transform=lambda sample: {"bytes": len(sample["jpg"])}, batch_size=500)
batch = next(iter(sizes))
print(f"{batch['bytes'].float().mean():.0f} bytes per image")
sizes.close()

# %% [markdown]
# `num_workers=0` decodes in threads of this process, which is often fast enough. Worker processes give the same order. Forked processes know the
# functions of a notebook. Where processes are not forked (Linux since Python 3.14), functions must be in a file; the loader reports it.

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
# ## Train without a loop
#
# `wt.train` is the verb `wdstrain train`. It writes checkpoints, metrics, a report and the configuration. After an interruption, `resume=True` continues.

# %%
run = str(folder / "run")
outcome = wt.train(
    shards,
    run,
    epochs=3,
    batch_size=32,
    lr=4e-3,
    image_size=32,
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
# A checkpoint can be evaluated on any shards that have its label.

# %%
task, metrics = wt.evaluate(f"{run}/checkpoints/best.pt", f"{shards}/val-*.tar")
print({name: round(value, 4) for name, value in metrics.items() if isinstance(value, float)})

# %% [markdown]
# ## Before a long run
#
# `wt.plan_epoch` previews an epoch on several GPUs without reading data: what each rank reads, its memory, and the quality of the shuffle.

# %%
display(wt.plan_epoch(train, batch_size=16, world_size=4, shuffle_buffer=200))

# %% [markdown]
# `wt.bench` measures the rate of each stage on this machine with these data, and names the bottleneck.

# %%
result = wt.bench(
    train, fields, batch_size=32, seconds=0.2, multiprocessing_context="fork", progress=False
)
display(result)

# %% [markdown]
# A loader's threads and processes end when the loader is closed, or when no reference to it is left. A notebook keeps results in `Out`, so close it.

# %%
loader.close()
val.close()

# %% [markdown]
# ## Read on
#
# * `help(wt.Loader)` and the other docstrings: shapes, units, errors. `wdstrain --help`: the same in a shell.
# * The guides, in the folder `docs` of the repository.
# * `shards/notebook/run/report.html`: the report that `wt.train` wrote.
