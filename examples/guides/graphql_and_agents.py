"""Tests of the shop that the guide to GraphQL and agents builds: its ``shop/tests.py``."""

import asyncio
import json
import logging

from django.contrib.auth.models import User
from django.test import TransactionTestCase, override_settings
from django.urls import path
from mcp.client import Client
from shop import bank
from shop.agent import server
from shop.models import Payout
from shop.schema import schema
from shop.whole import WholeRequestView

urlpatterns = [path("whole/", WholeRequestView.as_view(schema=schema))]
DOCUMENT = """mutation {
    a: payOut(number: "17", cents: 900)
    b: payOut(number: "18", cents: 200000)
}"""


class PaymentTests(TransactionTestCase):
    def setUp(self):
        logging.disable(logging.ERROR)  # both libraries log each error
        self.addCleanup(logging.disable, logging.NOTSET)
        bank.transfers.clear()
        self.client.force_login(User.objects.create(username="jane", is_staff=True))

    def send(self, document, key="first", url="/graphql/"):
        headers = {"Idempotency-Key": key} if key else {}
        body = json.dumps({"query": document})
        return self.client.post(url, body, "application/json", headers=headers).json()

    def test_each_mutation_runs_once_and_a_refusal_has_a_code(self):
        first, retry = (self.send(DOCUMENT) for _ in range(2))
        assert first["data"] == {"a": "tr_1", "b": None}
        (error,) = first["errors"]
        assert error["extensions"]["code"] == "refused"
        assert retry == first
        assert (len(bank.transfers), Payout.objects.count()) == (1, 1)
        for error in self.send(DOCUMENT, key="")["errors"]:
            assert error["extensions"]["code"] == "key_missing"

    @override_settings(ROOT_URLCONF="shop.tests")
    def test_an_error_of_a_protected_view_is_not_stored(self):
        User.objects.update(is_staff=False)
        for _ in range(2):
            for error in self.send(DOCUMENT, url="/whole/")["errors"]:
                assert error["message"] == "You may not pay."

    def test_a_tool_pays_once_and_names_a_refusal(self):
        async def call(cents, key):
            async with Client(server) as client:
                arguments = {"number": key, "cents": cents, "idempotency_key": key}
                return await client.call_tool("pay", arguments)

        results = [asyncio.run(call(900, "19")) for _ in range(2)]
        assert [each.structured_content for each in results] == [{"transfer": "tr_1"}] * 2
        refused = asyncio.run(call(200_000, "20"))
        assert "above the limit" in refused.content[0].text
