// For tests of streams without a GPU: "cuda" tensors in host memory, a device guard that writes down what is asked of
// streams and events, and an engine of one rank that writes down its calls and the streams they run on. A torch that is
// built for the cpu alone takes them for CUDA.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "core/engine.h"
#include "core/error.h"

namespace {

using ringcomm::Call;
using ringcomm::concat;

constexpr c10::DeviceType kType = c10::DeviceType::CUDA;

struct State {
  std::vector<std::string> log;
  int next_event = 0, next_stream = 0, alive = 0;
  bool capturing = false, events_done = true, aborted = false, names_foreign_streams = true;
} state;
thread_local c10::StreamId current = 0;

template <typename... Parts>
void note(const Parts&... parts) {
  state.log.push_back(concat(parts...));
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return {kType, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 2; }
  c10::Stream stream(c10::StreamId id) const { return c10::Stream(c10::Stream::UNSAFE, getDevice(), id); }
  c10::Stream getStream(c10::Device) const override { return stream(current); }
  c10::Stream exchangeStream(c10::Stream other) const override { return stream(std::exchange(current, other.id())); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool high_priority) const override {
    note("pool ", high_priority ? "high" : "low", " s", ++state.next_stream);
    return stream(state.next_stream);
  }
  void* getStreamNativeHandle(c10::Stream stream) const override {
    if (!state.names_foreign_streams) return nullptr;
    return reinterpret_cast<void*>(static_cast<std::intptr_t>(stream.id()));
  }
  bool isStreamCapturing(const c10::Stream&) const { return state.capturing; }  // virtual since torch 2.13
  static std::intptr_t number(void* event) { return reinterpret_cast<std::intptr_t>(event); }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = reinterpret_cast<void*>(static_cast<std::intptr_t>(++state.next_event));
    note("record e", number(*event), " s", stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    note("block s", stream.id(), " e", number(event));
  }
  bool queryEvent(void* event) const override {
    note("query e", number(event));
    return state.events_done;
  }
  void synchronizeEvent(void* event) const override { note("host waits e", number(event)); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream& stream) const override {
    note("keep s", stream.id());
  }
};

// ---- tensors -------------------------------------------------------------------------------------------------------

at::Tensor as_device(const at::Tensor& host, c10::DeviceIndex index = 0) {
  ++state.alive;
  return at::for_blob(host.data_ptr(), host.sizes())
      .strides(host.strides())
      .deleter([host](void*) { --state.alive; })
      .options(host.options().device(kType, index))
      .target_device(c10::Device(kType, index))
      .make_tensor();
}
at::Tensor as_host(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  return at::for_blob(tensor.data_ptr(), tensor.sizes())
      .strides(tensor.strides())
      .options(tensor.options().device(at::kCPU))
      .make_tensor();
}
at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat>) {
  return as_device(at::empty(sizes, type.value_or(at::kFloat)));
}
at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> type,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return as_device(at::empty_strided(sizes, strides, type.value_or(at::kFloat)));
}
at::Tensor& copy(at::Tensor& target, const at::Tensor& source, bool) {
  note("copy s", current);
  as_host(target).copy_(as_host(source));
  return target;
}

// ---- the engine ----------------------------------------------------------------------------------------------------

// A world of one rank. Its calls do what they do there: copy, or nothing.
class LoggingEngine final : public ringcomm::Engine {
 public:
  const char* kind() const override { return "fake"; }
  int rank() const override { return 0; }
  int world_size() const override { return 1; }
  std::string handle() const override { return ""; }
  void connect(const std::vector<std::string>&) override {}
  int run(const Call& call) override {
    check();
    note("run ", name(call.op), " s", call.stream);
    const std::size_t nbytes = call.count * element_bytes(call.dtype);
    if (call.input && call.output && call.input != call.output) std::memcpy(call.output, call.input, nbytes);
    return -1;
  }
  void run_list(const std::vector<Call>& calls) override {
    check();
    std::string names;
    for (const Call& call : calls) names += concat(' ', name(call.op));
    note("run_list", names, " s", calls.front().stream);
  }
  std::shared_ptr<ringcomm::Request> submit(Call) override { throw std::logic_error("nobody submits here"); }
  void pack(const ringcomm::PackCall&) override {}
  void combine(const ringcomm::CombineCall&) override {}
  void* allocate(std::size_t) override { return nullptr; }
  void release(void*) override {}
  void abort(const std::string& reason, ringcomm::ErrorCode) override { reason_ = reason, state.aborted = true; }
  bool aborted() const override { return state.aborted; }
  std::uintptr_t lend_stream() override {
    note("lend s", ++state.next_stream);
    return static_cast<std::uintptr_t>(state.next_stream);
  }
  void take_back_stream(std::uintptr_t stream) override { note("take back s", stream); }
  void set_timeout(std::int64_t timeout_ms) override { note("timeout ", timeout_ms); }
  std::int64_t timeout() const override { return 0; }
  void close() override { note("close"); }
  bool closed() const override { return false; }
  bool runs_this_thread() const override { return false; }
  std::vector<std::pair<std::string, std::string>> describe() const override { return {}; }
  void synchronize(std::uintptr_t) override { check(); }

 private:
  void check() const {
    if (state.aborted) ringcomm::fail(ringcomm::ErrorCode::kAborted, "fake: ", reason_);
  }
  std::string reason_;
};

}  // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy);
}

PYBIND11_MODULE(fake_cuda, m) {
  c10::impl::DeviceGuardImplRegistrar(kType, new Guard);
  m.def("tensor", as_device, py::arg("host"), py::arg("index") = 0);
  m.def("alive", [] { return state.alive; }, "Tensors on the device whose memory is in use.");
  m.def("host", as_host);
  m.def("engine", [] {
    return py::capsule(
        new std::shared_ptr<ringcomm::Engine>(std::make_shared<LoggingEngine>()), "ringcomm.Engine",
        [](PyObject* capsule) {
          delete static_cast<std::shared_ptr<ringcomm::Engine>*>(PyCapsule_GetPointer(capsule, "ringcomm.Engine"));
        });
  });
  m.def("log", [] { return std::exchange(state.log, {}); }, "What happened since the last look.");
  m.def("reset", [] { state = State{.alive = state.alive}; });
  m.def("set_stream", [](c10::StreamId id) { current = id; });
  m.def("set_capturing", [](bool capturing) { state.capturing = capturing; });
  m.def("set_events_done", [](bool done) { state.events_done = done; });
  m.def("set_names_foreign_streams", [](bool names) { state.names_foreign_streams = names; });
  m.def("set_aborted", [](bool aborted) { state.aborted = aborted; });
}
