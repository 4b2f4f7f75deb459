"""Token generation of one job: prefill, sampling, log probabilities, detokenization."""
