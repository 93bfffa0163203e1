"""`python -m dsec.cli`: the command without its script, as `up --detach` starts it."""

from dsec.cli.main import main

if __name__ == "__main__":
    main()
