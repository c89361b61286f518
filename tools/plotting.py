"""What the pictures share: their settings and colours, a page measured in inches, and how a page
becomes a file.

The first to import matplotlib: who lacks it is told what to install. A name that ends in neither
.png nor .svg is refused before, where arguments are read. Invariant: the same page is the same
file, whatever matplotlib is set to here.
"""

import io
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from errno import EISDIR

import minfer
from minfer.tools.conversation import replacing
from minfer.tools.render import one_line

try:
    os.environ["MPLBACKEND"] = "agg"  # whatever it says: no window is opened
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle
except ImportError as error:
    raise minfer.UnsupportedError(
        f"a picture needs matplotlib ({error}); pip install 'minfer[plot]'"
    ) from None

# Okabe and Ito's, told apart by those who see colours differently.
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")
GREY = "#555555"  # of what is read second
WIDTH, MARGIN, TITLE, LEGEND_LINE = 11.0, 0.35, 0.45, 0.24  # inches: a page, around it, heights
STYLE = {
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "minfer",
    "text.parse_math": False,
}


class Page:
    """A white figure, drawn on in inches from its upper left corner."""

    def __init__(self, height: float) -> None:
        self.figure = Figure(figsize=(WIDTH, height), facecolor="white")
        self._height = height

    def write(self, x: float, y: float, text: str, **how) -> None:
        """Text whose baseline is at y."""
        self.figure.text(x / WIDTH, 1 - y / self._height, text, va="baseline", **how)

    def title(self, text: str, facts: str) -> None:
        """The first line: TITLE high, below the margin."""
        y = MARGIN + 0.15
        self.write(MARGIN, y, text, fontsize=14, weight="bold")
        self.write(WIDTH - MARGIN, y, facts, color=GREY, ha="right")

    def legend(self, y: float, entries: list[tuple[str, str]], n_columns: int) -> None:
        """Each (text, colour), line by line: LEGEND_LINE high."""
        for k, (text, colour) in enumerate(entries):
            line, column = divmod(k, n_columns)
            x, top = MARGIN + column * (WIDTH - 2 * MARGIN) / n_columns, y + line * LEGEND_LINE
            left, bottom, width, height = self._area(x, top, 0.16, 0.12)
            patch = Rectangle((left, bottom), width, height, facecolor=colour, lw=0)
            self.figure.add_artist(patch)
            self.write(x + 0.22, top + 0.11, text)

    def axes(self, x: float, y: float, width: float, height: float) -> Axes:
        """A panel without a frame."""
        axes = self.figure.add_axes(self._area(x, y, width, height))
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, labelsize=8, labelcolor=GREY)
        return axes

    def _area(self, x: float, y: float, w: float, h: float) -> tuple[float, float, float, float]:
        return x / WIDTH, 1 - (y + h) / self._height, w / WIDTH, h / self._height


def label(text: str) -> str:
    """Text of a file or its name; what is no character is a question mark."""
    return one_line(text).encode("utf-8", "replace").decode()


@contextmanager
def written(out: str, option: str) -> Iterator[io.BytesIO]:
    """What becomes the file at `out`, which `option` names. It is opened before the `with` block,
    which may take long, and left as it was if that fails."""
    with ExitStack() as stack:
        with _named(out, option):
            if os.path.isdir(out):
                raise OSError(EISDIR, os.strerror(EISDIR))
            file = stack.enter_context(replacing(out))
        picture = io.BytesIO()
        yield picture
        with _named(out, option):
            file.write(picture.getbuffer())
            stack.close()


@contextmanager
def _named(out: str, option: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise minfer.FileError(
            f"{out}: {error.strerror or error}; name a picture that can be written with {option}"
        ) from None


def drawn(draw: Callable[[], Page], out: str) -> bytes:
    """The page as a file of the format that the name `out` ends in."""
    file, form = io.BytesIO(), out[-3:].lower()
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        warnings.simplefilter("ignore", UserWarning)  # a name that the font has no letters for
        metadata = {"Date": None} if form == "svg" else {"Software": None}
        draw().figure.savefig(file, format=form, dpi=150, metadata=metadata)
    return file.getvalue()
