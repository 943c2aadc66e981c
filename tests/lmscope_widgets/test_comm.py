"""The repair of ipykernel's routing, against the ipykernel that is installed."""

from __future__ import annotations

import inspect

import ipykernel
import pytest
from ipykernel import kernelbase
from ipykernel.comm.comm import BaseComm
from lmscope_widgets.comm import pin_comm

_HAS_ROUTING = tuple(map(int, ipykernel.__version__.split(".")[:2])) >= (7, 4)


class _SilentComm(BaseComm):
    def publish_msg(self, *args: object, **kwargs: object) -> None:
        pass


def test_a_comm_without_the_routing_is_left_alone() -> None:
    assert pin_comm(object()) is False


@pytest.mark.skipif(not _HAS_ROUTING, reason="this ipykernel has no routing to repair")
def test_messages_go_where_the_page_asked_and_not_where_python_last_published() -> None:
    comm = _SilentComm(target_name="test")
    comm._reply_subshell_id = "published from here"
    assert comm._reply_subshell_for({}, "asked for") == "published from here", (
        "ipykernel routes replies in another way now: see whether pin_comm is still needed"
    )

    assert pin_comm(comm) is True

    assert comm._reply_subshell_for({}, "asked for") == "asked for"
    assert comm._reply_subshell_for({"content": {"id": "x"}}, None) is None


@pytest.mark.skipif(not _HAS_ROUTING, reason="this ipykernel has no routing to repair")
def test_the_kernel_asks_the_comm_itself_so_that_the_repair_has_an_effect() -> None:
    source = inspect.getsource(kernelbase)

    assert 'getattr(comm, "_reply_subshell_for", None)' in source, (
        "ipykernel finds the subshell of a message in another way now: pin_comm does nothing"
    )
    assert "route(content.get(" in source
