"""The guides that need packages of this environment, followed as they are printed."""

from pathlib import Path

from tests.kit.printed import ROOT, Project


def test_the_guide_to_graphql_and_agents_can_be_followed(tmp_path: Path) -> None:
    guide = ROOT / "docs" / "how-to" / "graphql-and-agents.md"
    Project(tmp_path).follow(guide.read_text())
