"""The steps of `make gpu`: what each measures, the process it runs in, and the journal."""
