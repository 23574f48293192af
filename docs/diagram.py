"""Draw docs/diagram.svg, the two stages and the latents root between them: `python docs/diagram.py`."""

from pathlib import Path

WIDTH, HEIGHT = 1120, 520
SANS = "-apple-system, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
INK, SOFT, LINE = "#1f2328", "#59636e", "#8c959f"
BLUE, AMBER, GREEN, GREY = (
    ("#ddf0ff", "#0969da"),
    ("#fff4d6", "#9a6700"),
    ("#dcf7e3", "#1a7f37"),
    ("#f3f5f7", "#59636e"),
)

Colors = tuple[str, str]


def text(x: float, y: float, words: str, size: float = 13, color: str = INK, weight: int = 400, **more: str) -> str:
    """Draw a line of text, centred on x unless `anchor` is given."""
    family, anchor = more.get("family", SANS), more.get("anchor", "middle")
    safe = words.replace("&", "&amp;").replace("<", "&lt;")
    return (
        f'<text x="{x:g}" y="{y:g}" font-family="{family}" font-size="{size:g}" font-weight="{weight}" '
        f'fill="{color}" text-anchor="{anchor}" xml:space="preserve">{safe}</text>'
    )


def rect(x: float, y: float, width: float, height: float, colors: Colors, radius: float = 8, dash: str = "") -> str:
    """Draw a box with rounded corners."""
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" '
        f'fill="{colors[0]}" stroke="{colors[1]}" stroke-width="1.3"{dashes}/>'
    )


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """Draw a straight arrow."""
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{LINE}" stroke-width="1.8" '
        f'marker-end="url(#head)"/>'
    )


def panel(x: float, width: float, title: str, about: str, colors: Colors) -> str:
    """Draw the background of a stage, with a title and a subtitle above it."""
    middle = x + width / 2
    return (
        text(middle, 48, title, 17, colors[1], 700)
        + text(middle, 68, about, 12.5, SOFT)
        + rect(x, 82, width, 322, colors, 12)
    )


def steps(x: float, width: float, boxes: list[tuple[str, str]], colors: Colors) -> str:
    """Draw a column of boxes, each with a title and a subtitle, and connect them with arrows."""
    drawn, height, gap = [], 58, 20
    for k, (title, about) in enumerate(boxes):
        y = 98 + k * (height + gap)
        drawn.append(rect(x, y, width, height, ("#ffffff", colors[1])))
        drawn.append(text(x + width / 2, y + 24, title, 13.5, INK, 600))
        drawn.append(text(x + width / 2, y + 43, about, 12, SOFT))
        if k:
            drawn.append(arrow(x + width / 2, y - gap + 1, x + width / 2, y - 3))
    return "".join(drawn)


def endpoint(x: float, y: float, lines: list[str], colors: Colors = GREY, dash: str = "") -> str:
    """Draw an input or output box; the first line is its title."""
    drawn = [rect(x, y, 128, 30 + 17 * len(lines), colors, 8, dash)]
    drawn += [
        text(x + 64, y + 27 + 17 * k, line, 13.5 if k == 0 else 12, INK if k == 0 else SOFT, 600 if k == 0 else 400)
        for k, line in enumerate(lines)
    ]
    return "".join(drawn)


def root(x: float, width: float) -> str:
    """Draw the files of a latents root."""
    rows = [
        ("encoding.json", "models and settings"),
        ("256x256/00042.3fa9c1d2/", "a part: moments + text"),
        ("commits/256x256/00042.json", "its receipt, created last"),
        ("512x512/00042.80b7e2d4/", "a part of the same tar"),
        ("tars/00042.json", "the tar's identity"),
        ("256x256/index.json", "all committed parts"),
    ]
    drawn = []
    for k, (name, about) in enumerate(rows):
        y = 112 + 49 * k
        drawn.append(text(x + 18, y, name, 13, INK, 600, family=MONO, anchor="start"))
        drawn.append(text(x + 18, y + 18, about, 12, SOFT, anchor="start"))
    return "".join(drawn)


def diagram() -> str:
    """Return the diagram as SVG."""
    stage_1 = [
        ("read and check the tar", "is every sample there?"),
        ("decode, crop, scale", "once for all buckets it covers"),
        ("VAE, text encoder", "in full batches, on the GPU"),
        ("commit", "rename the part, create its receipt"),
    ]
    stage_2 = [
        ("order", "step → samples, a pure function"),
        ("load", "read, verify, batch"),
        ("loss", "noise, U-Net, error"),
        ("step, checkpoint", "the same command resumes"),
    ]
    body = [
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="14" fill="#ffffff" stroke="#d0d7de"/>',
        endpoint(20, 98, ["metadata", "LAION: select,", "then download"], dash="5 4"),
        arrow(84, 181, 84, 210),
        endpoint(20, 214, ["tars", "key.jpg, key.txt,", "from anywhere"]),
        panel(180, 236, "Stage 1", "python -m precompute, a Ray job", BLUE),
        steps(200, 196, stage_1, BLUE),
        panel(448, 224, "The latents root", "a folder, or s3://…", AMBER),
        root(448, 224),
        panel(704, 236, "Stage 2", "python -m train, on 1 to N GPUs", GREEN),
        steps(724, 196, stage_2, GREEN),
        endpoint(972, 98, ["checkpoints", "safetensors", "and JSON"]),
        arrow(1036, 181, 1036, 210),
        endpoint(972, 214, ["pipeline", "diffusers loads it"]),
        arrow(149, 254, 177, 254),
        arrow(417, 361, 445, 361),
        arrow(673, 127, 701, 127),
        '<path d="M 941 361 H 956 V 139 H 968" fill="none" stroke="#8c959f" stroke-width="1.8" '
        'marker-end="url(#head)"/>',
        text(298, 432, "512 px: 786,432 bytes of pixels", 12.5, SOFT),
        text(560, 432, "→ 65,536 of moments, 157,696 of text", 12.5, SOFT),
        text(822, 432, "no pixels, no VAE, no text encoder", 12.5, SOFT),
        text(WIDTH / 2, 474, "Encode once. Train as often as you like.", 16, INK, 600),
        text(WIDTH / 2, 497, "The stages never import each other: the root is all that they share.", 12.5, SOFT),
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="Tars go through stage 1 into the latents root; stage 2 trains from the root alone.">'
    )
    marker = (
        '<defs><marker id="head" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M 0 0 L 10 5 L 0 10 z" fill="{LINE}"/></marker></defs>'
    )
    return "\n".join([head, marker, *body, "</svg>"]) + "\n"


if __name__ == "__main__":
    (Path(__file__).parent / "diagram.svg").write_text(diagram())
