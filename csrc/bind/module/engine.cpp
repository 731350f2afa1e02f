// `_C`, the torch-free Python module. Integers and bytes go in, integers and bytes come out; the GIL is released while
// a call runs. `run_plain`, `submit_plain` and `pack_plain` take arrays and are plain C functions, because they are
// called for every small array, or for many arrays: examining the arrays in Python, or a dispatch by signature, would
// take longer than the call.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "bind/capsule.h"
#include "bind/error_class.h"
#include "bind/module/define.h"
#include "bind/module/plain_array.h"
#include "bind/module/site.h"
#include "bind/raise.h"
#include "core/call/check.h"
#include "core/call/signature.h"
#include "core/engine.h"
#include "core/error.h"
#include "core/norm.h"
#include "core/schedule.h"
#include "runtime/observe/recording_engine.h"

namespace py = pybind11;

namespace ringcomm {
namespace {

using PartList = std::vector<std::pair<std::uintptr_t, std::size_t>>;

// ---- errors --------------------------------------------------------------------------------------------------------

void set_python_error(const Error& error) { raise_in_python("ringcomm.errors", error_class(error.code()), error); }

void translate(std::exception_ptr pending) {
  try {
    if (pending) std::rethrow_exception(pending);
  } catch (const Error& error) {
    set_python_error(error);
  }
}

// ---- calls ---------------------------------------------------------------------------------------------------------

const char* engines() { return cuda_build().empty() ? "cpu" : "cpu, cuda"; }

std::unique_ptr<Engine> make_engine(const std::string& kind, int rank, int world_size, std::int64_t timeout_ms,
                                    std::size_t slot_bytes, int device, int channels) {
  EngineOptions options;
  if (timeout_ms > 0) options.timeout_ms = timeout_ms;
  options.slot_bytes = slot_bytes;
  options.device = device;
  options.channels = channels;
  if (kind == "cpu") return make_cpu_engine(rank, world_size, options);
  if (kind != "cuda")
    fail(ErrorCode::kUnsupported, "Engine: rank ", rank, " asked for engine '", kind, "', this build has: ", engines(),
         "; pass engine='cpu' or install a build that has it");
  if (const std::string why = why_no_cuda(); !why.empty())
    fail(ErrorCode::kUnsupported, "Engine: rank ", rank, " asked for engine 'cuda', which cannot run here: ", why,
         " (`ringcomm doctor` says more)");
  return make_cuda_engine(rank, world_size, options);
}

template <typename Enum>
Enum checked(int value, Enum last, const char* what) {
  if (value < 0 || value > static_cast<int>(last))
    fail(ErrorCode::kInvalid, what, " is ", value, ", expected 0 to ", static_cast<int>(last),
         "; take the numbers from the tables of this module");
  return static_cast<Enum>(value);
}

std::vector<Part> to_parts(const PartList& parts) {
  std::vector<Part> result;
  for (const auto& [address, count] : parts) result.push_back({reinterpret_cast<void*>(address), count});
  return result;
}

// The arguments of run and submit in Python, in order.
using OptionalParts = std::optional<PartList>;
using Fields = std::tuple<int, int, int, int, int, int, std::uintptr_t, std::uintptr_t, std::size_t, double,
                          std::int64_t, OptionalParts, OptionalParts, std::uintptr_t>;

Call make_call(const Fields& fields) {
  const auto& [op, dtype, reduce_op, algorithm, root, tag, input, output, count, factor, timeout_ms, input_parts,
               output_parts, stream] = fields;
  Call call;
  call.op = checked(op, Op::kRecv, "op");
  call.dtype = checked(dtype, DType::kComplex128, "dtype");
  call.reduce_op = checked(reduce_op, ReduceOp::kBxor, "reduce_op");
  call.algorithm = checked(algorithm, Algorithm::kCopyEngine, "algorithm");
  call.root = root;
  call.tag = tag;
  call.input = reinterpret_cast<const void*>(input);
  call.output = reinterpret_cast<void*>(output);
  call.count = count;
  call.factor = factor;
  call.timeout_ms = timeout_ms;
  if (input_parts) call.input_parts = to_parts(*input_parts);
  if (output_parts) call.output_parts = to_parts(*output_parts);
  call.stream = stream;
  call.site = python_site();
  return call;
}

template <typename... Args>
int run(Engine& engine, Args... args) {
  const Call call = make_call(Fields(std::move(args)...));
  const py::gil_scoped_release release;
  return engine.run(call);
}

template <typename... Args>
std::shared_ptr<Request> submit(Engine& engine, Args... args) {
  Call call = make_call(Fields(std::move(args)...));
  const py::gil_scoped_release release;
  return engine.submit(std::move(call));
}

// Returns (source, dtype, elements, bytes) of the message that a recv from `root` would take next; None: there is none
// yet.
std::optional<std::tuple<int, int, std::size_t, std::size_t>> probe(Engine& engine, int root, int tag,
                                                                    std::int64_t timeout_ms, bool waits) {
  Call call;
  call.op = Op::kProbe;
  call.root = root;
  call.tag = tag;
  call.timeout_ms = timeout_ms;
  call.site = python_site();
  const py::gil_scoped_release release;
  const std::optional<MessageInfo> found = engine.probe(call, waits);
  if (!found) return std::nullopt;
  return std::make_tuple(found->source, static_cast<int>(found->dtype), found->nbytes / element_bytes(found->dtype),
                         found->nbytes);
}

void run_list(Engine& engine, const std::vector<Fields>& list) {
  std::vector<Call> calls;
  for (const Fields& fields : list) calls.push_back(make_call(fields));
  const py::gil_scoped_release release;
  engine.run_list(calls);
}

void pack(Engine& engine, const std::vector<std::tuple<std::uintptr_t, std::uintptr_t, std::size_t>>& pieces, int from,
          int to, double factor, std::uintptr_t stream) {
  PackCall packing;
  packing.from = checked(from, DType::kComplex128, "dtype");
  packing.to = checked(to, DType::kComplex128, "dtype");
  packing.factor = factor;
  packing.stream = stream;
  for (const auto& [source, target, count] : pieces)
    packing.pieces.push_back({reinterpret_cast<const void*>(source), reinterpret_cast<void*>(target), count});
  const py::gil_scoped_release release;
  engine.pack(packing);
}

void combine(Engine& engine, std::uintptr_t first, std::uintptr_t second, std::uintptr_t output, std::size_t count,
             int dtype, int op, int divisor, std::uintptr_t stream) {
  CombineCall combining;
  combining.dtype = checked(dtype, DType::kBool, "dtype");
  combining.op = checked(op, ReduceOp::kBxor, "reduce_op");
  combining.first = reinterpret_cast<const void*>(first);
  combining.second = reinterpret_cast<const void*>(second);
  combining.output = reinterpret_cast<void*>(output);
  combining.count = count;
  combining.divisor = divisor;
  combining.stream = stream;
  const py::gil_scoped_release release;
  engine.combine(combining);
}

// Returns every rank's byte string, by rank: gathers the lengths, then all strings padded to the longest. Needs an
// engine whose memory is the host's.
std::vector<py::bytes> exchange(Engine& engine, const std::string& payload) {
  if (engine.device() >= 0)
    fail(ErrorCode::kUnsupported, "exchange: rank ", engine.rank(), " expected a cpu engine, got ", engine.kind(),
         "; make a cpu engine beside it");
  const std::size_t world_size = static_cast<std::size_t>(engine.world_size());
  std::vector<std::int64_t> lengths(world_size);
  std::string gathered;
  std::size_t longest = 0;
  {
    const py::gil_scoped_release release;
    const std::int64_t length = static_cast<std::int64_t>(payload.size());
    Call call;
    call.op = Op::kAllGather;
    call.dtype = DType::kInt64;
    call.input = &length;
    call.output = lengths.data();
    call.count = 1;
    engine.run(call);
    for (const std::int64_t each : lengths) longest = larger(longest, static_cast<std::size_t>(each));
    std::string padded = payload;
    padded.resize(longest);
    gathered.resize(longest * world_size);
    call.dtype = DType::kUInt8;
    call.input = padded.data();
    call.output = gathered.data();
    call.count = longest;
    engine.run(call);
  }
  std::vector<py::bytes> result;
  for (std::size_t r = 0; r < world_size; ++r)
    result.emplace_back(gathered.data() + r * longest, static_cast<std::size_t>(lengths[r]));
  return result;
}

void close(Engine& engine) {
  {
    const py::gil_scoped_release release;
    engine.close();
  }
  if (PyErr_Occurred()) throw py::error_already_set();  // a signal handler has raised
}

// Returns the payloads of the surviving ranks after an abort, by rank; see Engine::agree_on_shrink.
std::vector<py::bytes> agree_on_shrink(Engine& engine, const std::string& payload, const std::vector<int>& members,
                                       std::int64_t limit_ms) {
  std::vector<std::string> payloads;
  {
    const py::gil_scoped_release release;
    payloads = engine.agree_on_shrink(payload, members, limit_ms);
  }
  return {payloads.begin(), payloads.end()};
}

// ---- the fast path --------------------------------------------------------------------------------------------------

template <typename Enum>
std::optional<Enum> named(PyObject* text, Enum last) {
  if (PyUnicode_Check(text))
    for (int i = 0; i <= static_cast<int>(last); ++i)
      if (PyUnicode_CompareWithASCIIString(text, name(static_cast<Enum>(i))) == 0) return static_cast<Enum>(i);
  return std::nullopt;
}

std::optional<int> whole_number(PyObject* number) {
  int overflow = 0;
  const long value = PyLong_CheckExact(number) ? PyLong_AsLongAndOverflow(number, &overflow) : LONG_MAX;
  return overflow == 0 && value == static_cast<int>(value) ? std::optional<int>(value) : std::nullopt;
}

bool is_peer(const Engine& engine, int rank) {
  return rank >= 0 && rank < engine.world_size() && rank != engine.rank();
}

// Whether input and output fit each other: element types, shapes, and memory that is disjoint or in place.
bool fit(const Engine& engine, Op op, const PlainArray& input, const PlainArray& output) {
  const int ranks = engine.world_size();
  const bool gathers = op == Op::kAllGather, scatters = op == Op::kReduceScatter;
  const PlainArray &whole = gathers ? output : input, &part = gathers ? input : output;
  if (input.dtype() != output.dtype()) return false;
  if (gathers || scatters ? !whole.holds(part, ranks) : !whole.has_shape_of(part)) return false;
  if (op == Op::kAllToAll && (whole.num_dims() == 0 || whole.extent(0) % ranks != 0)) return false;
  const std::size_t place = gathers || scatters ? part.nbytes() * static_cast<std::size_t>(engine.rank()) : 0;
  return !whole.overlaps(part) || part.data() == whole.data() + place;
}

// Fills `call` from arguments, with the checks of the full path. False: they need the full path.
bool prepare(const Engine& engine, PyObject* const* args, PlainArray& input, PlainArray& output, Call& call) {
  const std::optional<Op> op = named(args[0], Op::kRecv);
  const std::optional<ReduceOp> reduce_op = named(args[1], ReduceOp::kBxor);
  const bool any_source = op == Op::kRecv && args[2] == Py_None;
  const std::optional<int> root = any_source ? kAnySource : whole_number(args[2]), tag = whole_number(args[3]);
  if (!op || !reduce_op || !root || !tag) return false;
  call.op = *op;
  call.reduce_op = *reduce_op;
  call.root = *root;
  call.tag = *tag;
  const bool sends = *op == Op::kSend, receives = *op == Op::kRecv;
  switch (*op) {
    case Op::kBarrier:
      return engine.device() < 0;  // on a device it waits for a stream
    case Op::kSend:
    case Op::kRecv:
      if (!any_source && !is_peer(engine, *root)) return false;
      break;
    case Op::kBroadcast:
      if (!is_peer(engine, *root) && *root != engine.rank()) return false;
      break;
    case Op::kAllReduce:
    case Op::kReduceScatter:
    case Op::kAllGather:
    case Op::kAllToAll:
      break;
    default:  // only the root has an input or output
      return false;
  }
  const bool in_place = args[4] == args[5];
  if (!sends && !output.read(args[5], true, engine.device())) return false;
  if (!receives && (sends || !in_place) && !input.read(args[4], false, engine.device())) return false;
  const PlainArray &from = receives || (in_place && !sends) ? output : input, &to = sends ? input : output;
  const bool reduces = *op == Op::kAllReduce || *op == Op::kReduceScatter;
  if (reduces && (*reduce_op == ReduceOp::kPremulSum || !supports(to.dtype(), *reduce_op))) return false;
  if (!sends && !receives && !fit(engine, *op, from, to)) return false;
  call.dtype = to.dtype();
  call.input = receives ? nullptr : from.data();
  call.output = sends ? nullptr : to.data();
  call.count = from.count() < to.count() ? from.count() : to.count();
  if (*op == Op::kAllToAll) call.count /= static_cast<std::size_t>(engine.world_size());
  return engine.device() < 0 || from.find_stream(call.stream);
}

// Tells autograd that a call writes to those of `arrays`, a tuple, that are torch tensors, as torch's own in-place
// operations do: a backward pass that needs the old values then raises an error. False: with a Python error set.
bool raise_versions(PyObject* arrays) {
  static PyObject *tensor = nullptr, *increment = nullptr;
  if (increment == nullptr) {
    const auto torch = py::reinterpret_steal<py::object>(PyImport_GetModule(py::str("torch").ptr()));
    if (!torch) return !PyErr_Occurred();  // arrays of another library
    tensor = py::object(torch.attr("Tensor")).release().ptr();
    increment = py::object(torch.attr("_C").attr("_increment_version")).release().ptr();
  }
  const auto is_tensor = [](PyObject* array) { return reinterpret_cast<PyObject*>(Py_TYPE(array)) == tensor; };
  PyObject* const* const first = &PyTuple_GET_ITEM(arrays, 0);
  PyObject* const* const last = first + PyTuple_GET_SIZE(arrays);
  if (std::all_of(first, last, is_tensor)) {
    const auto done = py::reinterpret_steal<py::object>(PyObject_CallOneArg(increment, arrays));
    return static_cast<bool>(done);
  }
  py::list tensors;
  std::for_each(first, last, [&](PyObject* array) {
    if (is_tensor(array)) tensors.append(py::handle(array));
  });
  return static_cast<bool>(py::reinterpret_steal<py::object>(PyObject_CallOneArg(increment, tensors.ptr())));
}

bool raise_version(PyObject* array) {
  const auto one = py::reinterpret_steal<py::object>(PyTuple_Pack(1, array));
  return one && raise_versions(one.ptr());
}

// The answer of `act`, a method of `_C.Engine`; null, with a Python error set, if it throws.
template <typename Act>
PyObject* answer_of(Act act) {
  try {
    return act();
  } catch (const Error& error) {
    set_python_error(error);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// Makes a call from the arguments of a method of `_C.Engine`, if they need no preparation: `act` gets the call, without
// the GIL, and `answer` the result of `act`. Otherwise returns None. `outlives`: the call may end after the method.
template <typename Act, typename Answer>
PyObject* call_plain(const char* method, PyObject* self, PyObject* const* args, Py_ssize_t num_args, bool outlives,
                     Act act, Answer answer) {
  if (num_args != 6) return PyErr_Format(PyExc_TypeError, "%s takes 6 arguments, got %zd", method, num_args);
  return answer_of([&]() -> PyObject* {
    Engine& engine = *py::handle(self).cast<Engine*>();
    PlainArray input, output;
    Call call;
    if (!prepare(engine, args, input, output, call)) Py_RETURN_NONE;
    if (outlives && call.input != nullptr && args[4] != args[5] && !input.keeps_memory(args[4])) Py_RETURN_NONE;
    if (outlives && call.output != nullptr && !output.keeps_memory(args[5])) Py_RETURN_NONE;
    const bool writes = call.output != nullptr && !(call.op == Op::kBroadcast && call.root == engine.rank());
    if (writes && output.has_exchange() && !raise_version(args[5])) return nullptr;
    call.site = python_site();
    return answer([&] {
      const py::gil_scoped_release release;
      return act(engine, std::move(call));
    }());
  });
}

// Engine.run_plain(op, reduce_op, root, tag, input, output) -> int | None
PyObject* run_plain(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  return call_plain(
      "run_plain", self, args, num_args, false, [](Engine& engine, const Call& call) { return engine.run(call); },
      [](int source) { return PyLong_FromLong(source); });
}

// Engine.submit_plain(op, reduce_op, root, tag, input, output) -> Request | None
PyObject* submit_plain(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  return call_plain(
      "submit_plain", self, args, num_args, true,
      [](Engine& engine, Call&& call) { return engine.submit(std::move(call)); },
      [](std::shared_ptr<Request> request) { return py::cast(std::move(request)).release().ptr(); });
}

std::optional<double> factor_of(PyObject* number) {
  if (!PyFloat_CheckExact(number)) return whole_number(number);
  const double factor = PyFloat_AS_DOUBLE(number);
  return std::isinf(factor) ? std::nullopt : std::optional<double>(factor);
}

// Fills `packing` from the arguments of pack_plain, with the checks of the full path. `arrays`: one for each of `list`.
// False: they need the full path.
bool prepare(const Engine& engine, PyObject* const* args, PyObject* list, PlainArray& bucket,
             std::vector<PlainArray>& arrays, PackCall& packing) {
  const std::optional<double> factor = factor_of(args[2]);
  const bool unpacks = args[3] == Py_True;
  if (!factor || arrays.empty() || !bucket.read(args[1], !unpacks, engine.device())) return false;
  packing.factor = *factor;
  packing.pieces.reserve(arrays.size());
  std::size_t total = 0;
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    PlainArray& array = arrays[i];
    if (!array.read(PyTuple_GET_ITEM(list, i), unpacks, engine.device())) return false;
    if (array.dtype() != arrays[0].dtype() || array.count() > bucket.count() - total || array.overlaps(bucket))
      return false;
    char* const place = bucket.data() + total * element_bytes(bucket.dtype());
    packing.pieces.push_back({unpacks ? place : array.data(), unpacks ? array.data() : place, array.count()});
    total += array.count();
  }
  packing.from = unpacks ? bucket.dtype() : arrays[0].dtype();
  packing.to = unpacks ? arrays[0].dtype() : bucket.dtype();
  const bool copies = packing.from == packing.to && packing.factor == 1.0;
  if (!copies && (!can_cast(packing.from) || !can_cast(packing.to))) return false;
  return engine.device() < 0 || bucket.find_stream(packing.stream);
}

// Engine.pack_plain(tensors, bucket, scale, unpacks) -> bool
PyObject* pack_plain(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  if (num_args != 4) return PyErr_Format(PyExc_TypeError, "pack_plain takes 4 arguments, got %zd", num_args);
  return answer_of([&]() -> PyObject* {
    if (!PyList_CheckExact(args[0]) && !PyTuple_CheckExact(args[0])) Py_RETURN_FALSE;
    // Keeps the arrays alive while another thread may change a list.
    const auto list = py::reinterpret_steal<py::object>(PySequence_Tuple(args[0]));
    if (!list) return nullptr;
    Engine& engine = *py::handle(self).cast<Engine*>();
    PlainArray bucket;
    std::vector<PlainArray> arrays(static_cast<std::size_t>(PyTuple_GET_SIZE(list.ptr())));
    PackCall packing;
    if (!prepare(engine, args, list.ptr(), bucket, arrays, packing)) Py_RETURN_FALSE;
    const bool unpacks = args[3] == Py_True;
    const auto has_exchange = [](const PlainArray& array) { return array.has_exchange(); };
    const bool tensors = unpacks ? std::any_of(arrays.begin(), arrays.end(), has_exchange) : bucket.has_exchange();
    if (tensors && !(unpacks ? raise_versions(list.ptr()) : raise_version(args[1]))) return nullptr;
    {
      const py::gil_scoped_release release;
      engine.pack(packing);
    }
    Py_RETURN_TRUE;
  });
}

// work_stream(array, device) -> int | None
PyObject* work_stream(PyObject* /*module*/, PyObject* const* args, Py_ssize_t num_args) {
  const std::optional<int> device = num_args == 2 ? whole_number(args[1]) : std::nullopt;
  if (!device) return PyErr_Format(PyExc_TypeError, "work_stream takes an array and the index of its device");
  const std::optional<std::uintptr_t> stream = PlainArray::work_stream(args[0], *device);
  if (!stream) Py_RETURN_NONE;
  return PyLong_FromSize_t(*stream);
}

PyCFunction as_method(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef kRunPlain = {
    "run_plain", as_method(run_plain), METH_FASTCALL,
    "run_plain(op: str, reduce_op: str, root: int | None, tag: int, input: object, output: object) -> int | None\n\n"
    "A call on plain arrays with every default: the source of a recv, else -1. On a device it runs on the stream on "
    "which the library of the first array works now. None: nothing was done, because the arguments need preparation or "
    "are wrong."};

PyMethodDef kSubmitPlain = {
    "submit_plain", as_method(submit_plain), METH_FASTCALL,
    "submit_plain(op: str, reduce_op: str, root: int | None, tag: int, input: object, output: object) -> Request | "
    "None\n\n"
    "Starts a call as run_plain makes it; the arrays must live, and keep their memory, until it is done."};

PyMethodDef kPackPlain = {
    "pack_plain", as_method(pack_plain), METH_FASTCALL,
    "pack_plain(tensors: object, bucket: object, scale: object, unpacks: bool) -> bool\n\n"
    "Copies a list or tuple of plain arrays into a plain bucket, or back. On a device it runs on the stream on which "
    "the library of the bucket works now. False: nothing was done, because the arguments need preparation or are "
    "wrong."};

PyMethodDef kWorkStream = {
    "work_stream", as_method(work_stream), METH_FASTCALL,
    "work_stream(array: object, device: int) -> int | None\n\n"
    "The stream on which the library of an array works now on a CUDA device. None: the library does not tell by "
    "DLPack's C exchange interface."};

// ---- sums that do not depend on the order --------------------------------------------------------------------------

void define_norm(py::module_& m) {
  m.def(
      "abs_max",
      [](const PartList& spans, int dtype) { return abs_max(to_parts(spans), checked(dtype, DType::kBool, "dtype")); },
      py::arg("spans"), py::arg("dtype"), py::call_guard<py::gil_scoped_release>(),
      "The largest magnitude in (address, count) pairs of floats; NaN if there is one; 0 without elements.");
  m.def(
      "fold_sums",
      [](const PartList& spans, int dtype, int exponent) {
        return fold_sums(to_parts(spans), checked(dtype, DType::kBool, "dtype"), exponent);
      },
      py::arg("spans"), py::arg("dtype"), py::arg("exponent"), py::call_guard<py::gil_scoped_release>(),
      "The sums of (x / 2^exponent)^2 over (address, count) pairs of finite floats below 2^exponent; see core/norm.h.");
}

// ---- the module ----------------------------------------------------------------------------------------------------

void define_engine(py::module_& m) {
  py::class_<Engine, std::shared_ptr<Engine>> engine(m, "Engine", "One rank of one communicator; see core/engine.h.");
  engine
      .def(py::init([](const std::string& kind, int rank, int world_size, std::int64_t timeout_ms,
                       std::size_t slot_bytes, int device, int channels) {
             return share_beside_python(
                 record(make_engine(kind, rank, world_size, timeout_ms, slot_bytes, device, channels)));
           }),
           py::arg("kind"), py::arg("rank"), py::arg("world_size"), py::arg("timeout_ms") = 0,
           py::arg("slot_bytes") = 0, py::arg("device") = 0, py::arg("channels") = 0)
      .def_property_readonly("kind", &Engine::kind)
      .def_property_readonly("rank", &Engine::rank)
      .def_property_readonly("world_size", &Engine::world_size)
      .def_property_readonly("aborted", &Engine::aborted)
      .def_property_readonly("closed", &Engine::closed)
      .def_property_readonly("why_aborted",
                             py::cpp_function(&Engine::why_aborted, py::call_guard<py::gil_scoped_release>()))
      .def_property("timeout_ms", &Engine::timeout, &Engine::set_timeout)
      .def("handle", [](const Engine& self) { return py::bytes(self.handle()); })
      .def("connect", &Engine::connect, py::arg("handles"), py::call_guard<py::gil_scoped_release>())
      .def("close", &close)
      .def_property_readonly("aborted_as", [](const Engine& self) { return error_class(self.aborted_as()); })
      .def(
          "abort",
          [](Engine& self, const std::string& reason, const std::string& error) {
            self.abort(reason, error_code(error));
          },
          py::arg("reason"), py::arg("error") = "AbortedError", py::call_guard<py::gil_scoped_release>())
      .def("agree_on_shrink", &agree_on_shrink, py::arg("payload"), py::arg("members"), py::arg("limit_ms"))
      .def("describe",
           [](const Engine& self) {
             py::dict facts;
             for (const auto& [fact, value] : self.describe()) facts[py::str(fact)] = value;
             return facts;
           })
      .def(
          "allocate",
          [](Engine& self, std::size_t nbytes) { return reinterpret_cast<std::uintptr_t>(self.allocate(nbytes)); },
          py::arg("nbytes"), py::call_guard<py::gil_scoped_release>())
      .def(
          "release", [](Engine& self, std::uintptr_t data) { self.release(reinterpret_cast<void*>(data)); },
          py::arg("data"), py::call_guard<py::gil_scoped_release>())
      .def("exchange", &exchange, py::arg("payload"))
      .def("synchronize", &Engine::synchronize, py::arg("stream") = 0, py::call_guard<py::gil_scoped_release>())
      .def("probe", &probe, py::arg("root"), py::arg("tag"), py::arg("timeout_ms"), py::arg("waits"))
      .def("run_list", &run_list, py::arg("calls"))
      .def("pack", &pack, py::arg("pieces"), py::arg("from_dtype"), py::arg("to_dtype"), py::arg("factor") = 1.0,
           py::arg("stream") = 0)
      .def("combine", &combine, py::arg("first"), py::arg("second"), py::arg("output"), py::arg("count"),
           py::arg("dtype"), py::arg("reduce_op"), py::arg("divisor") = 1, py::arg("stream") = 0)
      .def("capsule", &to_capsule<Engine>);
  const auto define_call = [&](const char* method, auto function) {
    engine.def(method, function, py::arg("op"), py::arg("dtype"), py::arg("reduce_op"), py::arg("algorithm"),
               py::arg("root"), py::arg("tag"), py::arg("input"), py::arg("output"), py::arg("count"),
               py::arg("factor") = 1.0, py::arg("timeout_ms") = 0, py::arg("input_parts") = py::none(),
               py::arg("output_parts") = py::none(), py::arg("stream") = 0);
  };
  using Address = std::uintptr_t;
  define_call("run", &run<int, int, int, int, int, int, Address, Address, std::size_t, double, std::int64_t,
                          OptionalParts, OptionalParts, Address>);
  define_call("submit", &submit<int, int, int, int, int, int, Address, Address, std::size_t, double, std::int64_t,
                                OptionalParts, OptionalParts, Address>);
  for (PyMethodDef* method : {&kRunPlain, &kSubmitPlain, &kPackPlain})
    engine.attr(method->ml_name) =
        py::reinterpret_steal<py::object>(PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(engine.ptr()), method));
  m.attr(kWorkStream.ml_name) = py::reinterpret_steal<py::object>(PyCFunction_NewEx(&kWorkStream, nullptr, nullptr));
}

void define_request(py::module_& m) {
  py::class_<Request, std::shared_ptr<Request>>(m, "Request", "A call in flight.")
      .def_property_readonly("done", &Request::done)
      .def_property_readonly("source", &Request::source)
      .def("wait", &Request::wait, py::arg("timeout_ms") = 0, py::call_guard<py::gil_scoped_release>())
      .def("start_now", &Request::start_now, py::call_guard<py::gil_scoped_release>())
      .def("join", &Request::join, py::arg("stream"), py::call_guard<py::gil_scoped_release>());
}

// The values of an enum: {name: number}.
template <typename Enum>
std::map<std::string, int> table(Enum last) {
  std::map<std::string, int> numbers;
  for (int i = 0; i <= static_cast<int>(last); ++i) numbers[name(static_cast<Enum>(i))] = i;
  return numbers;
}

py::dict build_info() {
  py::dict info;
  info["version"] = RINGCOMM_VERSION;
  info["build_type"] = RINGCOMM_BUILD_TYPE;
  info["compiler"] = __VERSION__;
  info["engines"] = engines();
  info["cuda"] = cuda_build().empty() ? "not built" : cuda_build();
  info["instruction_sets"] = RINGCOMM_ISAS;
#if defined(RINGCOMM_ONLY_DTYPE)
  info["only"] = "one pair of dtype and reduce op (RINGCOMM_ONLY)";
#endif
  return info;
}

py::tuple ring_step_of(int rank, int world_size, int step) {
  if (world_size < 1 || rank < 0 || rank >= world_size || step < 0 || step > last_step(Op::kAllReduce, world_size))
    fail(ErrorCode::kInvalid, "ring_step: rank ", rank, " of ", world_size, " at step ", step,
         " is not in the schedule of the ring; expected a rank below the world size and a step from 0 to 2(W-1)");
  const RingStep at = ring_step(rank, world_size, step);
  return py::make_tuple(at.send_chunk, at.recv_chunk, at.reduce);
}

}  // namespace

std::shared_ptr<Engine> share_beside_python(std::unique_ptr<Engine> engine) {
  std::shared_ptr<Engine> owner = share(std::move(engine));
  Engine* const raw = owner.get();
  return std::shared_ptr<Engine>(raw, [owner = std::move(owner)](Engine*) mutable {
    if (!PyGILState_Check()) return owner.reset();
    const py::gil_scoped_release release;
    owner.reset();
  });
}

}  // namespace ringcomm

PYBIND11_MODULE(_C, m) {
  using namespace ringcomm;
  m.doc() = "The torch-free core of ringcomm: engines, schedule and tables.";
  py::register_local_exception_translator(&translate);
  define_request(m);
  define_engine(m);
  define_norm(m);
  define_simulate(m);
  define_trace(m);
  define_hierarchy(m);
  define_nccl(m);
  define_pool(m);
  define_record(m);
  define_training(m);
  m.attr("DTYPES") = table(DType::kComplex128);
  m.attr("REDUCE_OPS") = table(ReduceOp::kBxor);
  m.attr("OPS") = table(Op::kRecv);
  m.attr("ALGORITHMS") = table(Algorithm::kCopyEngine);
  m.def(
      "scan_mark",
      [](int dtype, int op, bool exclusive) {
        return scan_mark(static_cast<DType>(dtype), static_cast<ReduceOp>(op), exclusive);
      },
      py::arg("dtype"), py::arg("op"), py::arg("exclusive"), "The root that marks the rounds of a scan.");
  m.def("build_info", &build_info, "What this build is and has.");
  m.def("why_no_cuda", &why_no_cuda, "Why the engine 'cuda' cannot run here, in one sentence; empty if it can.",
        py::call_guard<py::gil_scoped_release>());
  m.def("ring_step", &ring_step_of, py::arg("rank"), py::arg("world_size"), py::arg("step"),
        "(send_chunk, recv_chunk, reduce) of one rank at one step of the ring.");
  m.def(
      "supports",
      [](int dtype, int op) {
        return supports(checked(dtype, DType::kComplex128, "dtype"), checked(op, ReduceOp::kBxor, "reduce_op"));
      },
      py::arg("dtype"), py::arg("reduce_op"), "Whether a type has a reduction operator.");
}
