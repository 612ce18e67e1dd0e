"""How a test uses the page: what it presses, and what it reads."""

IDLE = "document.getElementById('stop').hidden"


def opened(tab, server, width=1280, theme="light", motion="no-preference"):
    """Load the page and wait for its list of experts."""
    tab.open(server.address, width, theme, motion=motion)
    tab.until("document.getElementById('expert').options.length || document.querySelector('.error')")


def send(tab, prompt):
    """Type a prompt and press Enter."""
    tab.run("document.getElementById('prompt').focus()")
    tab.type(prompt)
    tab.press("Enter")


def ask(tab, prompt):
    """Type a prompt, wait for the end of its answer, and give that."""
    before = tab.run("document.querySelectorAll('.turn').length")
    send(tab, prompt)
    tab.until(f"document.querySelectorAll('.turn').length > {before} && {IDLE}")
    return texts(tab)[-1]


def choose(tab, model):
    """Take an expert."""
    tab.run(f"document.getElementById('expert').value = {model!r}")
    assert tab.run("document.getElementById('expert').value") == model


def press(tab, label):
    """Click the button with a label, where it can be seen."""
    tab.click(f"[...document.querySelectorAll('button')].find(b => b.textContent === {label!r} && b.offsetParent)")


def read(tab, selector):
    """The texts of all elements."""
    return tab.run(f"[...document.querySelectorAll({selector!r})].map(e => e.textContent)")


def texts(tab):
    """All answers."""
    return read(tab, ".text")


def fill(tab, field, value):
    """Write over what stands in a field."""
    tab.run(f"document.getElementById({field!r}).select()")
    tab.type(str(value))
