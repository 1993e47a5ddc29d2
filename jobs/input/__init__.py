"""Input of jobs: files of several formats become items, as a stream in bounded memory (docs/use/job-inputs.md)."""

from jobs.input.read import Format, read_items
from jobs.input.template import Template

__all__ = ["Format", "Template", "read_items"]
