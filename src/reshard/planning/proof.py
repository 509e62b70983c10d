def check_plan(plan): pass
