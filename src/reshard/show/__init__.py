"""Plans, layouts and run reports for people: text, terminal, page, trace.

plan_text   a plan as text, and why it is as it is
picture     a layout of a 1-d or 2-d tensor as cells: which rank holds what
holdings    what each rank holds, as a table of ranks
frame       a picture as lines of text, cells in a frame
matrix      bytes from every rank, host or group to every other
ink         coloured text, or plain text where colours are not wanted
terminal    pictures and tables as text
name_patterns  many tensor names as few patterns
page/       one self-contained HTML page; a plan as a file of any kind
trace       a timeline for a trace viewer
run_report  what a live run did
progress    a progress bar of a live run
"""
