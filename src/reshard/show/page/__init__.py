"""One self-contained HTML page of a plan or a checkpoint, and cells of a notebook.

plan_page  a plan and what a run of it measured as a page; a plan as a file of any kind
notebook   plans, layouts and reports as cells of a notebook
document   what is on a page, and how it becomes HTML
drawings   pictures and matrices as rectangles with places, one look for each set of ranks; links
           between pieces of two pictures that share elements, and who sends these to whom

The templates are ``page.html`` (the frame), ``doc.html`` (its content), ``parts.html`` (drawings),
``cell.html`` (a cell of a notebook), ``form.html`` (the fields of ``reshard explore``),
``page.css`` and ``page.js``.
"""

from reshard.show.page.plan_page import render, save

__all__ = ["render", "save"]
