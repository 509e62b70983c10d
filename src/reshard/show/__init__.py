"""Plans, layouts and run reports for people: text, terminal, page, trace.

plan_text   a plan as text, and why it is as it is
holdings    which rank holds what of a layout, as cells of a picture and as rows of a table
terminal    pictures and tables as text, coloured or plain
traffic     who sends how much to whom, as a matrix and as a timeline for a trace viewer
name_patterns  many tensor names as few patterns
page/       one self-contained HTML page; a plan as a file of any kind
run_report  what a live run did
progress    a progress bar of a live run
"""
