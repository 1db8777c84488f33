"""A plain training loop on shards: DDP, mixed precision, checkpoints in the middle of an epoch.

    python scripts/examples/train_loop.py shards/photos --out runs/loop --epochs 3
    torchrun --nproc-per-node 4 scripts/examples/train_loop.py shards/photos --out runs/loop

Run the same command again after a kill: it continues at the step after the last checkpoint.
"""

import argparse
import os
from pathlib import Path

import torch
import torchvision
from torch import distributed, nn

import wdstrain as wt


def main() -> None:
    parser = argparse.ArgumentParser(description="Train an image classifier in a plain loop.")
    parser.add_argument("shards", help="folder of shards with the splits train and val")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="of each rank")
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--checkpoint-every", type=int, default=1000, metavar="STEPS")
    arguments = parser.parse_args()
    ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    has_gpu = torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if has_gpu else "cpu")
    if ranks > 1:  # before the loader is made, which asks for its rank
        distributed.init_process_group("nccl" if has_gpu else "gloo")
    torch.manual_seed(0)
    fields = {
        "image": wt.image(size=arguments.image_size, augment="rrc+flip"),
        "label": wt.label(),
    }
    loader = wt.Loader(arguments.shards, fields, split="train", batch_size=arguments.batch_size)
    model = torchvision.models.resnet18(num_classes=len(loader.index.labels[0].classes)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    checkpoint = arguments.out / "last.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    ddp = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    while (position := loader.next_position) < (arguments.epochs, 0):
        for step, batch in enumerate(wt.to_device(loader, device), position[1] + 1):
            with torch.autocast(device.type, torch.bfloat16, enabled=has_gpu):
                loss = nn.functional.cross_entropy(ddp(batch["image"] / 255), batch["label"])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            is_due = step % arguments.checkpoint_every == 0 or step == len(loader)
            if is_due and rank == 0:
                arguments.out.mkdir(parents=True, exist_ok=True)
                state = {name: part.state_dict() for name, part in parts.items()}
                torch.save(state, arguments.out / "new.pt")
                os.replace(arguments.out / "new.pt", checkpoint)  # a kill leaves the last one
                print(f"epoch {position[0]}, step {step}: loss {loss.item():.3f}", flush=True)
    if rank == 0:
        print(f"done; {loader.report()['verdict']}")
    loader.close()
    if ranks > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
