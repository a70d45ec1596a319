"""`Mailbox`: copies are taken in order, when they have arrived, or all at once."""

from polymp.mailbox import Mailbox


class Late:
    """A copy that arrives when it is told to, or when it is waited for."""

    def __init__(self, value: int) -> None:
        self.value = value
        self.here = False

    def is_ready(self) -> bool:
        return self.here

    def values(self) -> int:
        self.here = True
        return self.value


def test_copies_are_taken_in_order_and_without_waiting() -> None:
    mailbox: Mailbox[str] = Mailbox()
    first, second = Late(1), Late(2)
    mailbox.post(first, "first")
    mailbox.post(second, "second")
    second.here = True
    assert list(mailbox.taken()) == [], "the second does not overtake the first"
    first.here = True
    assert list(mailbox.taken()) == [(1, "first"), (2, "second")]
    assert not mailbox


def test_all_are_taken_by_waiting() -> None:
    mailbox: Mailbox[None] = Mailbox()
    copies = [Late(at) for at in range(3)]
    for copy in copies:
        mailbox.post(copy, None)
    assert mailbox
    assert [value for value, _ in mailbox.taken(wait=True)] == [0, 1, 2]
    assert all(copy.here for copy in copies)
    assert not mailbox
