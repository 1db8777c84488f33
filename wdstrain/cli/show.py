"""The verb show: a contact sheet of samples, of what lies in shards or of what a loader makes of it."""

from __future__ import annotations

import argparse
from typing import Any

from wdstrain.cli.words import result, selected, urls, verb, where
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
    from wdstrain.looking.doors import check_ending, peek, peek_varied
    from wdstrain.looking.picking import Wanted
    from wdstrain.report.terminal import print_message, print_result

    if arguments.out:
        check_ending(arguments.out)
    classes, keys = tuple(arguments.named), tuple(arguments.keys)
    n = arguments.n if arguments.n is not None else _SHOWN // 3 if classes else _SHOWN
    wanted = Wanted(n, arguments.order or "first", classes, keys, arguments.label, arguments.seed)
    found = (
        peek_varied(selected(arguments), wanted, *_loading(arguments))
        if _loads(arguments)
        else peek(selected(arguments, one_split=False), **vars(wanted))
    )
    file = found.save(arguments.out) if arguments.out else None
    if not arguments.json and file is None:
        print_result(repr(found))
        return 0
    shown: dict[str, Any] = {
        "title": found.title,
        "notes": list(found.notes),
        "shown": len(found),
        "broken": found.broken,
    }
    rows = [("shown", found.title), ("broken", str(found.broken) if found.broken else "none")]
    for seen in found:
        if seen.error:
            print_message(f"{seen.shard}: '{seen.key}' at offset {seen.offset}: {seen.error}")
    for note in found.notes:
        print_message(note)
    result(
        arguments,
        {**shown, "file": file, "samples": [one.facts for one in found]},
        [*rows, ("sheet", file or "")],
    )
    return 0


def _loads(arguments: argparse.Namespace) -> bool:
    """Whether pictures are to be as a loader delivers them."""
    asked = arguments.augment is not None or arguments.image_size is not None
    for name in ("epoch", "copies"):
        if getattr(arguments, name) is not None and not asked:
            raise UsageError(
                f"--{name} is of pictures as a loader delivers them. Give --augment or --image-size too."
            )
    return asked


def _loading(arguments: argparse.Namespace) -> tuple[Any, range]:
    """The field of the loader, and its epochs."""
    from wdstrain.decode.fields import image

    epoch, copies = arguments.epoch or 0, arguments.copies if arguments.copies is not None else 1
    if epoch < 0 or not 1 <= copies <= 16:
        raise UsageError(
            f"--epoch {epoch} --copies {copies}: epochs count from 0, and 1 to 16 copies are shown."
        )
    size = arguments.image_size if arguments.image_size is not None else 224
    return image(size=size, augment=arguments.augment), range(epoch, epoch + copies)
