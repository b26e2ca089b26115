"""Many runs of one command: which they are, which of them are over, and what a person sees of them."""
