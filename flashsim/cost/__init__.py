"""What a run must cost, without running it: closed-form counts, tile rules, devices."""
