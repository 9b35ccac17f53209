"""The diagnosis in a notebook cell: `import doctor; doctor.diagnose()`.

A kernel may hold another torch in memory than pip has meanwhile put on disk. The trials run what is on disk, which is what
a restarted kernel would get; the difference is said first.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from doctor import phrases, render
from doctor.diagnosis import Diagnosis, Wall
from doctor.facts import ABSENT, PACKAGES, Facts
from doctor.privacy import scrub


@dataclass(frozen=True, repr=False)
class ShownDiagnosis(Diagnosis):
    """A diagnosis that shows itself; `notes` are about this kernel, not about the machine."""

    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return render.text(self, notes=self.notes)

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return page(self)

    def _repr_markdown_(self) -> str:
        return render.markdown(self, notes=self.notes)


def diagnose(
    model: str | None = None,
    *,
    facts: Facts | None = None,
    children: bool = True,
    timeout_s: float = 12,
    **options: Any,
) -> ShownDiagnosis:
    """The diagnosis of this machine, or of saved `facts`; `options` are fields of `doctor.memory.Sizes` (group_size, ...).

    ValueError for a `model` that can only be a local one and is none.
    """
    from doctor.memory import Sizes
    from doctor.plan import diagnose as judge
    from doctor.shape_files import no_model

    sizes = Sizes(**options)  # a misspelt one is told before the machine is looked at

    notes: tuple[str, ...] = ()
    if facts is None:
        if model and (why := no_model(model)):
            raise ValueError(str(why))
        from doctor.probes import probe

        facts = probe(children=children, timeout_s=timeout_s)
        live = loaded_versions(sys.modules)
        facts = replace(facts, extra=MappingProxyType({**facts.extra, "loaded": live}))
        notes = tuple(kernel_notes(facts, live))
    made = judge(facts, model, sizes)
    return ShownDiagnosis(**{f.name: getattr(made, f.name) for f in fields(Diagnosis)}, notes=notes)


def loaded_versions(modules: Mapping[str, Any]) -> dict[str, str]:
    """Versions of the packages that this process has already imported."""
    found = {}
    for name in PACKAGES:
        version = getattr(modules.get(name), "__version__", None)
        if isinstance(version, str):
            found[name] = version
    return found


def kernel_notes(facts: Facts, loaded: Mapping[str, str]) -> list[str]:
    """What this kernel holds that differs from the disk, and that it has to be restarted."""
    notes = []
    for name, live in loaded.items():
        on_disk = facts.packages.get(name)
        if on_disk is None or _same(live, on_disk):
            continue
        what = "it is no longer installed" if on_disk == ABSENT else f"{on_disk} is installed on disk"
        notes.append(f"this kernel has {name} {live} loaded, but {what}")
    if notes:
        notes.append("restart the kernel before importing anything (Colab: Runtime > Restart session; "
                     "Kaggle, Jupyter: Restart), then ask again")  # fmt: skip
    for holder in facts.extra.get("memory_holders") or ():
        gib = holder.get("gib")
        if holder.get("name") == "this Python process" and isinstance(gib, (int, float)) and gib > 1:
            notes.append(f"this kernel itself holds {gib:.1f} GiB of GPU {holder.get('gpu')}; a restart frees it")
    return notes


def _same(live: str, on_disk: str) -> bool:
    """Equal versions; a tag that only one of them carries does not count."""
    (a, _, tag_a), (b, _, tag_b) = live.partition("+"), on_disk.partition("+")
    return a == b and (tag_a == tag_b or not tag_a or not tag_b)


def page(d: ShownDiagnosis) -> str:
    """The report as HTML that follows the notebook's own colours."""
    above, below, warnings = phrases.better_walls(d)
    details = [part for part in (phrases.how(d), phrases.memory(d), phrases.batch(d)) if part]
    parts = ['<div style="max-width: 60em; line-height: 1.45">']
    parts += [f"<p><b>note:</b> {_text(note)}</p>" for note in d.notes]
    parts.append(f"<p><b>{_text(phrases.verdict(d))}</b></p>")
    parts.append(
        "<ul>" + "".join(f"<li>{_text(t)}</li>" for t in (*details, *(r.text for r in d.plan.reasons))) + "</ul>"
    )
    rows = "".join(
        f"<tr><td><code>{_text(name)}</code></td><td>{state}</td><td>{_text(why)}</td></tr>"
        for name, state, why in phrases.path_rows(d)
    )
    parts.append(f"<table><tr><th>path</th><th>state</th><th>why</th></tr>{rows}</table>")
    parts += [_wall(wall, is_open=True) for wall in above]
    if after := phrases.after(d):
        parts.append(f"<p><b>{_text(after)}</b></p>")
    parts += [_wall(wall, is_open=False) for wall in (*warnings, *below)]
    facts = _text("\n".join(render.paste_lines(d)))
    parts.append(f"<details><summary>this machine (nothing private in it)</summary><pre>{facts}</pre></details></div>")
    return "\n".join(parts)


def _wall(wall: Wall, *, is_open: bool) -> str:
    closing = f"closes {phrases.closes(wall)}" if wall.closes else "a warning"
    items = [f"<li>because {_text(b)}</li>" for b in wall.because]
    for help in wall.help:
        command = f"<pre>{html.escape(help.command)}</pre>" if help.command else ""
        items.append(f"<li>help: {_text(phrases.help_text(help))}{command}</li>")
    if wall.wont_help:
        items.append(f"<li>no use: {_text(wall.wont_help)}</li>")
    head = f"<b>{_text(wall.code)}</b> ({_text(closing)}): {_text(wall.fact)}"
    return f"<details{' open' * is_open}><summary>{head}</summary><ul>{''.join(items)}</ul></details>"


def _text(text: str) -> str:
    return html.escape("\n".join(scrub(line, None) for line in text.split("\n")))
