"""What `dsec doctor` asks: one module a subject; a check is a function that gives a finding."""
