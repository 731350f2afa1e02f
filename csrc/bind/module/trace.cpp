// The timeline of runtime/observe/trace.h for Python.
#include "runtime/observe/trace.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bind/module/define.h"
#include "core/call/parts.h"

namespace py = pybind11;

namespace ringcomm {

namespace {

void add(py::dict& args, const char* key, std::int64_t value) {
  if (value >= 0) args[key] = value;
}

void add_call(py::dict& args, const trace::CallFacts& call) {
  if (call.op != Op::kBarrier && call.op != Op::kProbe) {
    args["dtype"] = name(call.dtype);
    args["count"] = call.count;
  }
  if (reduces(call.op)) args["reduce_op"] = name(call.reduce_op);
  if (rooted(call.op)) args["root"] = call.root;
  if ((call.op == Op::kAllGather || call.op == Op::kBarrier) && call.root) args["mark"] = call.root;
  if (point_to_point(call.op)) args["peer"] = call.root;
  args["algorithm"] = call.algorithm ? call.algorithm : name(call.asked);
  add(args, "training_step", call.training_step);
  if (*call.site) args["site"] = call.site;
  if (call.failed) args["failed"] = true;
}

// Returns (name, category, begin, end, arguments).
py::tuple describe(const trace::Span& span) {
  py::dict args;
  args["rank"] = span.origin.rank;
  args["world_size"] = span.origin.world_size;
  args["group"] = span.origin.group;
  add(args, "number", span.origin.number);
  const bool whole = span.kind == trace::SpanKind::kCall;
  if (whole) add_call(args, span.call);
  add(args, "peer", span.peer);
  add(args, "ticket", span.ticket);
  add(args, "step", span.step);
  add(args, "send_chunk", span.send_chunk);
  add(args, "recv_chunk", span.recv_chunk);
  add(args, "rail", span.rail);
  add(args, "bytes", span.nbytes);
  const std::string title = whole ? std::string("ringcomm:") + name(span.call.op) : trace::name(span.kind);
  return py::make_tuple(title, trace::category(span.kind), span.begin_ns, span.end_ns, args);
}

py::tuple stop() {
  trace::Timeline timeline;
  {
    const py::gil_scoped_release release;
    timeline = trace::stop();
  }
  py::list threads;
  for (const trace::ThreadSpans& each : timeline.threads) {
    py::list spans(each.spans.size());
    for (std::size_t i = 0; i < each.spans.size(); ++i) spans[i] = describe(each.spans[i]);
    threads.append(py::make_tuple(each.thread, each.role, spans));
  }
  return py::make_tuple(threads, timeline.dropped);
}

}  // namespace

void define_trace(py::module_& m) {
  m.def("trace_start", &trace::start, py::arg("spans_per_thread"),
        "Switches the timeline on; every thread has room for so many spans.");
  m.def("trace_stop", &stop,
        "Switches it off: [(thread, role, [(name, category, begin_ns, end_ns, arguments)])], and how many spans found "
        "no room. Times are of CLOCK_MONOTONIC.");
}

}  // namespace ringcomm
