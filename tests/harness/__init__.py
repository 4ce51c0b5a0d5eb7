"""Stand-ins, real processes and whole systems that several folders of tests share."""
