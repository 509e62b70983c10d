"""Drawings of layouts and plans: in a terminal, as a page, as a trace.

picture     a layout of a 1-d or 2-d tensor as cells: who holds what
holdings    what each rank holds, as a table of ranks
ink         coloured text, or plain text where colours are not wanted
terminal    pictures and tables as text
matrix      bytes from every rank, host or group to every other
page        one self-contained HTML page
trace       a timeline for a trace viewer
save        a plan as a file of any of these kinds
"""
