"""Whether the running test has failed, for what ends after it: pytest does not raise a test's failure in fixtures."""


class Outcome:
    has_failed = False


RUNNING = Outcome()
