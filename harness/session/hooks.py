"""One pytest session: feeds the recorder, writes records as tests finish, and distrusts green.

A worker of xdist (and a run without xdist) writes a part of DIR/parts; the controller merges the
parts into DIR/results.jsonl when the session ends. A test whose worker crashed or hung gets its
record here. The session fails, with a sentence, when a collected test left no record, when nothing
ran, and when a check failed in a test that passed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings

from moe_parity.harness.session import environment, guesses, provenance
from moe_parity.harness.session.distrust import complaints
from moe_parity.harness.session.recorder import Item, Recorder, item_name, whole_name
from moe_parity.harness.session.said import labels_of, one_line, reason_of
from moe_parity.harness.session.skips import LOST_GPU, skip_test, why_of
from moe_parity.harness.session.watch import TOO_MANY, Overrun, Watch, install, last_words
from moe_parity.references.errors import ParityError
from moe_parity.references.skip import Skip, Why
from moe_parity.reports import parts
from moe_parity.reports.records import (
    ITEM_CHECK,
    Record,
    Run,
    RunEnd,
    RunInfo,
    from_json,
    to_line,
)
from moe_parity.reports.results import FILE_NAME, write


class Session:
    """The hooks of a session; `notes` are sentences for the end of the terminal's output."""

    def __init__(
        self,
        config: pytest.Config,
        *,
        out: Path | None,
        report: bool,
        device: str,
        require_gpu: bool,
        seed: int | None,
        selected: frozenset[str] | None,
        timeout: float,
        ours: bool = True,
        chosen: Mapping[str, str] | None = None,
    ) -> None:
        self.chosen = dict(chosen or {})
        """What chose among the tests besides -k and -m, by option."""
        self.config = config
        self.out = out
        self.report = report
        self.device = device
        self.require_gpu = require_gpu
        self.selected = selected
        self.timeout = timeout
        self.notes: list[str] = []
        self.unwritten = ""
        """Why results could not be written, in a sentence that says where the rest of them is."""
        self.recorder = Recorder(
            device=device, seed=seed, sink=self._write, named=item_name if ours else whole_name
        )
        # what the controller of xdist gives a worker; empty elsewhere
        self._given: dict[str, Any] = getattr(config, "workerinput", {})
        self._worker: str | None = self._given.get("workerid")
        self._parts: Path | None = None
        self._lock: parts.Lock | None = None
        self._info: RunInfo | None = None
        self._writer: parts.Writer | None = None
        self._watch = Watch(timeout)
        self._stop: str = ""
        self._collected: set[str] = set()
        self._extra: list[Record] = []
        self._began = time.perf_counter()

    # --- start ---------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Prove that results can be written before anything runs; save those of a killed run."""
        if self.config.option.collectonly:
            return
        try:
            self._parts = self._open()
            told = self._given.get("moe_parity_info")
            self._info = from_json(RunInfo, json.loads(told), "") if told else self._describe()
            if not self.config.pluginmanager.hasplugin("dsession"):
                self._writer = parts.Writer(parts.part(self._parts, self._worker), self._info)
        except (ParityError, OSError) as error:
            raise pytest.UsageError(str(error)) from None
        self._session = session
        self._watch = Watch(self.timeout, self._parts, self._worker)
        install(self._watch)

    def _open(self) -> Path:
        if self._worker is not None:
            return Path(self._given["moe_parity_parts"])
        if self.out is None:
            return Path(tempfile.mkdtemp(prefix="moe-parity-"))
        folder = parts.prepare(self.out)
        self._lock = parts.Lock(folder)
        if saved := parts.rescue(self.out):
            self.notes.append(saved)
        return folder

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker where its part goes, and what the run is."""
        node.workerinput["moe_parity_parts"] = str(self._parts)
        if self._info is not None:
            node.workerinput["moe_parity_info"] = to_line("run", self._info).decode()

    def _describe(self) -> RunInfo:
        commit, dirty = provenance.commit()
        program = Path(sys.argv[0])
        name = program.parent.name if program.name == "__main__.py" else program.name
        return RunInfo(
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            command=(name, *sys.argv[1:]),
            environment=environment.describe(self.device)
            | guesses.packages(self.selected)
            | {option.removeprefix("--"): text for option, text in self.chosen.items()},
            commit=commit,
            dirty=dirty,
            checkouts=provenance.checkouts(self.config.rootpath, self.selected, self.out),
            seed=self.recorder.seed,
            profile=hypothesis_settings.get_current_profile_name(),
            device=self.device,
        )

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Remember what was collected."""
        self._collected |= {item.nodeid for item in session.items}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Remember what a worker collected."""
        self._collected |= set(ids)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Limit the time of a file: the functions of a kernel are asked while it is collected."""
        self._watch.begin(f"collecting {collector.nodeid}", {})
        with self._watch.limit():
            report = yield
        self._watch.end()
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a file that could not be collected, or was skipped whole."""
        if report.passed:
            return
        where = report.nodeid or "collection"
        item = Item(where)
        if report.skipped:
            item.skipped = reason_of(report)
        else:
            lines = [line for line in report.longreprtext.splitlines() if line.strip()]
            text = lines[-1].removeprefix("E").strip()[:2000]
            hung = text.startswith("Overrun: ")
            item.failed = text.removeprefix("Overrun: ") if hung else f"cannot be collected: {text}"
        self._extra += self.recorder.records(item)

    # --- one test ------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Bracket a test, so that its records are written when it has finished."""
        labels = labels_of(item)
        self.recorder.start(item.nodeid, labels)
        self._watch.begin(item.nodeid, labels)
        result = yield
        # Not in a finally: a test that an interrupt broke off has not finished.
        failed = self.recorder.item is not None and self.recorder.item.failed
        self.recorder.finish()
        if failed and environment.gpu_lost():
            self._leave(item)
        self._watch.end()
        return result

    def _leave(self, item: pytest.Item) -> None:
        """End a process whose GPU answers no more, so that no later test is red for it."""
        if self._worker is not None:
            # all is written; another worker takes over
            os._exit(1)
        self._session.shouldstop = (
            f"{item.nodeid} left the GPU in an error that only a new process clears; the run ends "
            "there. With workers (-n 1 or more) it would go on."
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Leave a kernel alone that has hung or crashed too often."""
        kernel = str(labels_of(item).get("kernel", ""))
        if self._watch.given_up(kernel):
            skip_test(Skip(Why.GIVEN_UP, f"{kernel} hung or crashed in {TOO_MANY} cases before"))

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self) -> Generator[None, None, None]:
        """Limit the time of a test; a check starts it anew for each case."""
        with self._watch.limit():
            yield

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_fixture_setup(self) -> Generator[None, object, object]:
        """Limit the time of a fixture."""
        with self._watch.limit():
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Note the outcome of a phase; make a skip for want of a GPU an error if it must be."""
        if call.when == "teardown" and self.recorder.item is not None:
            # junit.xml gets them, also through xdist
            for name, check in self.recorder.item.checks.items():
                compared = f"{check.get('compared', 0)} compared"
                different = f"{check.get('differing', 0)} differing"
                text = f"{check['verdict']}, {compared}, {different}"
                item.user_properties.append((f"parity.{name}", text))
        report = yield
        running = self.recorder.item
        if running is None:
            return report
        running.seconds += report.duration
        if report.skipped:
            running.skipped = running.skipped or reason_of(report)
            running.expected_failure = hasattr(report, "wasxfail")
            why = why_of(call.excinfo.value if call.excinfo else None)
            running.why = running.why or (why.value if why else "")
            if self.require_gpu and why in LOST_GPU:
                self._refuse_skip(report, running)
        elif report.failed and running.failed is None:
            error = call.excinfo.value if call.excinfo else None
            if isinstance(error, Overrun):
                self._watch.gave_out(str(running.labels.get("kernel", "")))
            running.failed = one_line(error) if error else report.longreprtext.strip()
        return report

    def _refuse_skip(self, report: pytest.TestReport, running: Item) -> None:
        report.outcome = "failed"
        report.longrepr = f"a GPU is required, and the test was skipped: {running.skipped}"
        running.failed, running.skipped = report.longrepr, None

    def _write(self, record: Record) -> None:
        if self._writer is None or self._stop:
            return
        try:
            self._writer.add(record)
        except ParityError as error:
            # pytest, and a worker of xdist, stops when the running test is over
            self._stop = self._session.shouldstop = str(error)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Learn from a worker that it could not write; note one that died between tests."""
        self._stop = self._stop or getattr(node, "workeroutput", {}).get("moe_parity_stop", "")
        self._down = node.gateway.id
        assert self._parts is not None
        entry, sentence = last_words(self._parts, self._down, self.timeout)
        while_collecting = str(entry.get("nodeid", "")).partition("collecting ")[2]
        if while_collecting:
            self._extra += self.recorder.records(Item(while_collecting, failed=f"{sentence}."))
            self.notes += [] if f"{sentence}." in self.notes else [f"{sentence}."]
            # another worker would go the same way
            self.config.pluginmanager.getplugin("dsession")._max_worker_restart = 0

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        """Record a test that took its worker down, with its kernel and case."""
        assert self._parts is not None
        entry, sentence = last_words(self._parts, self._down, self.timeout)
        labels = entry.get("labels", {}) if entry.get("nodeid") == crashitem else {}
        if labels.get("kernel"):
            self._watch.gave_out(str(labels["kernel"]))
        report.longrepr = f"{sentence}."
        item = Item(crashitem, labels=labels, failed=f"{sentence}.", repro=entry.get("repro", ""))
        self._extra += self.recorder.records(item)

    # --- end -----------------------------------------------------------------------------------

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Merge the parts, and turn a green that proves nothing into a failure."""
        if self._parts is None or self._info is None:
            return
        if self._writer is not None:
            if self._worker is not None:
                for record in self._extra:
                    self._write(record)
                output: dict[str, Any] = getattr(self.config, "workeroutput", {})
                output["moe_parity_stop"] = self._stop
            self._writer.close()
        if self._worker is not None:
            return
        try:
            self._conclude(session, int(exitstatus))
        except ParityError as error:
            self.unwritten = self._kept(str(error))
        else:
            shutil.rmtree(self._parts, ignore_errors=True)
            self.unwritten = f"{self._stop} The run ended there." if self._stop else ""
        if self.unwritten:
            self.notes.append(self.unwritten)
            session.exitstatus = pytest.ExitCode.INTERRUPTED
        if self._lock is not None:
            self._lock.release()

    def _conclude(self, session: pytest.Session, exitstatus: int) -> None:
        assert self._parts is not None
        assert self._info is not None
        records = parts.merge(self._parts, self._extra)
        session.exitstatus = self._distrust(records, exitstatus)
        tests = [record for record in records if record.check == ITEM_CHECK]
        end = RunEnd(
            collected=len(self._collected | {record.nodeid for record in tests}),
            ran=sum(record.verdict != "skip" for record in tests),
            exitstatus=session.exitstatus,
            seconds=round(time.perf_counter() - self._began, 3),
        )
        if self.out is not None:
            self._publish(Run(self._info, records, end), self.out)

    def _kept(self, cause: str) -> str:
        """Return a sentence for results that could not be written: why, and where they are."""
        assert self._parts is not None
        return (
            f"{cause} What had finished is kept in {self._parts}: make room, then "
            f"`parity report {self._parts} -o report.html` reads it."
        )

    def _publish(self, run: Run, out: Path) -> None:
        run = write(run, out / FILE_NAME)
        self.notes.append(f"results: {out / FILE_NAME}")
        if self.report:
            from moe_parity.reports import write_all

            self.notes.append(f"report: {write_all(run, out)}")

    def _distrust(self, records: tuple[Record, ...], status: int) -> int:
        """Note whatever makes a session prove less than it seems to; return its exit status."""
        option = self.config.option
        known = complaints(
            records,
            collected=self._collected,
            named=self.recorder.named,
            kernels=self.selected or frozenset(),
            expressions={"-k": option.keyword, "-m": option.markexpr} | self.chosen,
            stopped=bool(self._stop),
            passed=status == pytest.ExitCode.OK,
        )
        self.notes += [complaint.sentence for complaint in known if complaint.sentence]
        if any(record.verdict in ("fail", "error") for record in records):
            status = 0 if status == pytest.ExitCode.NO_TESTS_COLLECTED else status
        return status or next((complaint.status for complaint in known), 0)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Write the notes."""
        if self.notes:
            terminalreporter.section("moe-parity")
            for note in self.notes:
                terminalreporter.write_line(note)
