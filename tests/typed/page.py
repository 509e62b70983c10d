"""What docs/page.md shows, as a type checker sees it; nothing here is run."""

from typing import assert_type

import reshard as rs

plan = rs.plan("dp=2 tp=4: (dp tp) -", "tp=2 @ 8-9: - tp", shape=(8192, 4096), dtype="bfloat16")
plan.save("plan.html")
report = rs.RunReport(rank=0, call=1, digest=plan.digest, seconds=0.25)
report.save("run-0.json")
assert_type(rs.RunReport.load("run-0.json"), rs.RunReport)
assert_type(rs.RunReport.from_json(report.to_json()), rs.RunReport)
plan.save("plan.html", reports=[report])
assert_type(rs.Layout.parse("dp=2 tp=4: (dp tp) -")._repr_html_(), str)
plan.save("plan.html", report=[report])  # type: ignore[call-arg]
