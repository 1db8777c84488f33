"""The verb show: a contact sheet of samples, of what lies in shards or of what a loader makes of it."""

from __future__ import annotations

import argparse
from typing import Any

from wdstrain.cli.common import result, selected, urls, verb, where
from wdstrain.errors import UsageError

_SHOWN = 24  # samples, unless somebody says otherwise; of each class that is named, a third of it


def add_show(verbs: Any) -> None:
    """Add the verb to those of the command line."""
    show = verb(
        verbs,
        "show",
        _show,
        "look at samples: a contact sheet, or a table",
        "show shards/photos -o sheet.png --random",
    )
    urls(show)
    where(show)
    show.add_argument(
        "-o",
        "--out",
        metavar="FILE",
        help="contact sheet to write, .png or .html (default: a table is printed)",
    )
    show.add_argument(
        "-n",
        type=int,
        metavar="N",
        help=f"samples (default: {_SHOWN}; {_SHOWN // 3} of each --class)",
    )
    which = show.add_mutually_exclusive_group()
    for order, text in (
        ("first", "the first samples (as without any of these)"),
        ("random", "some at random, the same for the same --seed"),
        ("classes", "evenly over all classes"),
    ):
        which.add_argument(f"--{order}", dest="order", action="store_const", const=order, help=text)
    which.add_argument(
        "--class",
        dest="named",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="of each of these classes",
    )
    which.add_argument(
        "--key",
        dest="keys",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY",
        help="the samples of these keys",
    )
    show.add_argument(
        "--label",
        metavar="NAME",
        help="label to show, and whose classes are meant (default: all, and the only one)",
    )
    show.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of what is random, and of a loader (default: 0)",
    )
    varied = show.add_argument_group("as a loader delivers them")
    varied.add_argument(
        "--augment", metavar="A", help="rrc, flip, trivialaugment, randaugment, with + between"
    )
    varied.add_argument(
        "--image-size",
        type=int,
        metavar="N",
        help="side of the pictures (default with --augment: 224)",
    )
    varied.add_argument("--epoch", type=int, metavar="E", help="epoch of the loader (default: 0)")
    varied.add_argument(
        "--copies",
        type=int,
        metavar="K",
        help="each picture as in K epochs from there on, side by side (default: 1)",
    )


def _show(arguments: argparse.Namespace) -> int:
    from wdstrain.inspection.show.api import check_ending, peek, peek_augmented
    from wdstrain.inspection.show.select import Selection
    from wdstrain.report.terminal import print_message, print_result

    if arguments.out:
        check_ending(arguments.out)
    classes, keys = tuple(arguments.named), tuple(arguments.keys)
    n = arguments.n if arguments.n is not None else _SHOWN // 3 if classes else _SHOWN
    order: Any = arguments.order or "first"
    wanted = Selection(n, order, classes, keys, arguments.label, arguments.seed)
    if _is_augmented(arguments):
        found = peek_augmented(selected(arguments), wanted, *_augmentation(arguments))
    else:
        found = peek(selected(arguments, one_split=False), **vars(wanted))
    file = found.save(arguments.out) if arguments.out else None
    if not arguments.json and file is None:
        print_result(repr(found))
        return 0
    for view in found:
        if view.error:
            print_message(f"{view.shard}: '{view.key}' at offset {view.offset}: {view.error}")
    for note in found.notes:
        print_message(note)
    report: dict[str, Any] = {
        "title": found.title,
        "notes": list(found.notes),
        "shown": len(found),
        "broken": found.broken,
        "file": file,
        "samples": [view.as_dict() for view in found],
    }
    broken = str(found.broken) if found.broken else "none"
    rows = [("shown", found.title), ("with an error", broken), ("written to", file or "")]
    result(arguments, report, rows)
    return 0


def _is_augmented(arguments: argparse.Namespace) -> bool:
    """Return whether images are shown as a loader delivers them. Raises UsageError."""
    is_augmented = arguments.augment is not None or arguments.image_size is not None
    for name in ("epoch", "copies"):
        if getattr(arguments, name) is not None and not is_augmented:
            raise UsageError(f"--{name} requires --augment or --image-size.")
    return is_augmented


def _augmentation(arguments: argparse.Namespace) -> tuple[Any, range]:
    """Return (image field of the loader, its epochs). Raises UsageError."""
    from wdstrain.decode.fields import image

    epoch = arguments.epoch or 0
    copies = arguments.copies if arguments.copies is not None else 1
    if epoch < 0:
        raise UsageError(f"--epoch {epoch}: must be >= 0.")
    if not 1 <= copies <= 16:
        raise UsageError(f"--copies {copies}: must be 1 to 16.")
    size = arguments.image_size if arguments.image_size is not None else 224
    return image(size=size, augment=arguments.augment), range(epoch, epoch + copies)
