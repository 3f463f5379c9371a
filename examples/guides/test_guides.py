"""The guides that need packages of this environment: followed as printed, then tested."""

from pathlib import Path

from tests.kit.printed import GUIDES, Project


def test_the_guide_to_graphql_and_agents_can_be_followed(tmp_path: Path) -> None:
    shop = Project(tmp_path)
    shop.follow((GUIDES / "graphql-and-agents.md").read_text())
    tests = Path(__file__).with_name("graphql_and_agents.py").read_text()
    (tmp_path / "shop" / "tests.py").write_text(tests)
    assert "Ran 3 tests" in shop.run("python manage.py test shop --verbosity 0")
