"""What a run does about faults: hangs, lost processes, bad steps, full memory."""
