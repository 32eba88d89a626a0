"""The wording of what sparkd prints, one file for each kind of output. `python -m tests.golden --update` writes them anew."""
