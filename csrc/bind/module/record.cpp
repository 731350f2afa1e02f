// The contents of communicators' flight recorders, and the training step that they record.
#include <pybind11/pybind11.h>

#include <variant>

#include "bind/module/define.h"
#include "bind/module/site.h"
#include "runtime/observe/flight_recorder.h"
#include "runtime/observe/site.h"

namespace py = pybind11;

namespace ringcomm {

namespace {

// A path may not be valid UTF-8.
py::object to_python(const RecordText::Fact& fact) {
  if (const auto* number = std::get_if<std::int64_t>(&fact)) return py::int_(*number);
  const auto& text = std::get<std::string>(fact);
  const auto length = static_cast<Py_ssize_t>(text.size());
  return py::reinterpret_steal<py::object>(PyUnicode_DecodeUTF8(text.data(), length, "backslashreplace"));
}

py::dict to_python(const RecordText::Facts& facts) {
  py::dict result;
  for (const auto& [key, fact] : facts) result[py::str(key)] = to_python(fact);
  return result;
}

// Returns (facts, calls, totals, waited) of a record of calls.
py::tuple read_record(const py::bytes& bytes, bool with_calls) {
  const RecordText text = RecordText::read(bytes, with_calls);
  py::list calls;
  for (const RecordText::Facts& call : text.calls) calls.append(to_python(call));
  py::list totals, waited;
  for (std::size_t i = 0; i < text.totals.size(); ++i) {
    totals.append(to_python(text.totals[i]));
    totals[i]["chosen"] = to_python(text.chosen[i]);
  }
  for (const std::int64_t ns : text.waited) waited.append(ns);
  return py::make_tuple(to_python(text.facts), calls, totals, waited);
}

}  // namespace

void define_record(py::module_& m) {
  serve_python_threads();
  m.attr("RECORD_NAME") = kRecordName;
  m.attr("RECORD_HEAD_BYTES") = sizeof(RecordHead);
  m.def("record_group", &RecordText::group, py::arg("head"),
        "The communicator's number in the first RECORD_HEAD_BYTES bytes of a record; 0: not connected, or no record.");
  m.def("read_record", &read_record, py::arg("bytes"), py::arg("with_calls") = true,
        "What a record of calls says: facts about its rank; its last calls, from old to new, with times in ns since "
        "1970 (none without `with_calls`); the totals of all calls by op and algorithm asked for, each with its "
        "numbers of calls by the algorithm "
        "that was chosen; and the ns that it waited for each peer, empty if unknown.");
  m.def("set_step", &set_step, py::arg("step"), "Names the step of training that this process is in; below 0: none.");
}

}  // namespace ringcomm
