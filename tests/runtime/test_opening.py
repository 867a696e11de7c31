"""What compile.json holds, and that an audit that fails is a line and no more."""

from types import SimpleNamespace

from jaxpar.runtime import opening


def test_the_audit_and_its_seconds(monkeypatch):
    """*Wrong*: the audit's seconds in place of the run's, or the other way round."""
    costs = {"hbm_limit": 16e9, "fits": False, "hbm_bytes": {"peak": 20e9}, "seconds": {"roofline": None}}
    monkeypatch.setattr(opening, "audit", lambda program, step: costs)
    said = []
    found = opening.describe_step(SimpleNamespace(step=None), {"compile": 2.0}, said.append)
    assert found == {**costs, "seconds": {"compile": 2.0, "roofline": None}}
    assert said == ["memory   20 GB of 16 GB on each device: does not fit by 4 GB"]


def test_no_failure_of_the_audit_stops_a_run(monkeypatch):
    def fail(program, step):
        raise ValueError("no opcode in\nthe HLO instruction 'x'")

    monkeypatch.setattr(opening, "audit", fail)
    said = []
    assert opening.describe_step(SimpleNamespace(step=None), {"load": 0.3}, said.append) == {"seconds": {"load": 0.3}}
    assert said == ["note     no audit: ValueError: no opcode in the HLO instruction 'x'"]
