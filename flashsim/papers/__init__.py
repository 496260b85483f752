"""Published numbers: data, the code that recomputes them, and a verdict for each.

`rows` gives them all; `flashsim paper` prints them.

>>> from flashsim import papers
>>> papers.rows(["fa1-fig2-flash"])[0].verdict
'within rounding'
"""

from .fa1_tables import Table, copies, tables
from .row import VERDICTS, Row, chosen, rows

__all__ = ["VERDICTS", "Row", "Table", "chosen", "copies", "rows", "tables"]
