#include "bind/c10d/streams.h"

#include <dlfcn.h>

#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "core/scope_exit.h"

namespace ringcomm {
namespace {

// Returns a function of the driver, if torch has loaded the driver; else null.
template <typename Function>
Function driver_function(const char* name) {
  void* const driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  return reinterpret_cast<Function>(driver ? dlsym(driver, name) : nullptr);
}

// torch's generic streams have an is_capturing since 2.13; for older versions this asks the driver.
[[maybe_unused]] bool driver_is_capturing(void* stream) {
  static const auto is_capturing = driver_function<int (*)(void* stream, int* status)>("cuStreamIsCapturing");
  int status = 0;  // 0: none, 1: active, 2: invalidated
  return is_capturing && is_capturing(stream, &status) == 0 && status != 0;
}

template <typename Stream>
bool is_capturing(const Stream& stream) {
  if constexpr (requires { stream.is_capturing(); }) {
    return stream.is_capturing();
  } else {
    return driver_is_capturing(stream.native_handle());
  }
}

class DeviceStreams final : public Streams {
 public:
  DeviceStreams(c10::Device device, std::shared_ptr<Engine> engine)
      : device_(device), guard_(device.type()), engine_(std::move(engine)), between_(device.type()) {}
  ~DeviceStreams() override {
    for (const std::uintptr_t stream : lent_) engine_->take_back_stream(stream);
  }

  c10::Stream current() const override { return guard_.getStream(device_); }
  c10::Stream side(std::size_t index) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = side_.find(index);
    if (found != side_.end()) return found->second;
    return side_.emplace(index, make_side_stream()).first->second;
  }
  void prepare(std::size_t num_side_streams) override {
    for (std::size_t index = 0; index < num_side_streams && lent_.size() == index; ++index) side(index);
  }
  std::uintptr_t handle(const c10::Stream& stream) const override {
    return reinterpret_cast<std::uintptr_t>(stream.native_handle());
  }
  bool capturing(const c10::Stream& stream) const override { return is_capturing(stream); }
  Event record(const c10::Stream& stream) override {
    c10::Event event = idle_event();
    event.record(stream);
    return event;
  }
  void reuse(c10::Event event) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_events_.push_back(std::move(event));
  }
  void order(const c10::Stream& earlier, const c10::Stream& later) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    between_.record(earlier);
    between_.block(later);
  }
  void keep_until_here(const at::Tensor& tensor, const c10::Stream& stream) const override {
    guard_.recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
  }
  void enqueued(Engine&, const c10::Stream&) const override {}

 private:
  // Returns a stream that the engine lends, with its address as torch's id of an external stream.
  // (c10::cuda::getStreamFromExternal does the same, but exists only in a torch with CUDA.) If torch does not accept
  // the id, or the engine lends no stream, returns one from torch's pool, whose 32 streams are shared by all users.
  c10::Stream make_side_stream() {
    if (const std::uintptr_t lent = engine_->lend_stream()) {
      const c10::Stream stream(c10::Stream::UNSAFE, device_, static_cast<c10::StreamId>(lent));
      if (is_named(stream, lent)) {
        lent_.push_back(lent);
        return stream;
      }
      engine_->take_back_stream(lent);
    }
    return guard_.getStreamFromGlobalPool(device_, /*isHighPriority=*/true);
  }
  bool is_named(const c10::Stream& stream, std::uintptr_t lent) const {
    try {
      return handle(stream) == lent;
    } catch (const c10::Error&) {
      return false;
    }
  }
  c10::Event idle_event() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (idle_events_.empty()) return c10::Event(device_.type());
    c10::Event event = std::move(idle_events_.back());
    idle_events_.pop_back();
    return event;
  }

  const c10::Device device_;
  const c10::impl::VirtualGuardImpl guard_;
  const std::shared_ptr<Engine> engine_;
  std::mutex mutex_;  // for the members below
  std::map<std::size_t, c10::Stream> side_;
  std::vector<std::uintptr_t> lent_;
  std::vector<c10::Event> idle_events_;
  c10::Event between_;  // recorded repeatedly: a wait refers to the last record before it
};

class HostStreams final : public Streams {
 public:
  c10::Stream current() const override { return c10::Stream(c10::Stream::DEFAULT, c10::kCPU); }
  c10::Stream side(std::size_t) override { return current(); }
  void prepare(std::size_t) override {}
  std::uintptr_t handle(const c10::Stream&) const override { return 0; }
  bool capturing(const c10::Stream&) const override { return false; }
  Event record(const c10::Stream&) override { return std::nullopt; }
  void reuse(c10::Event) override {}
  void order(const c10::Stream&, const c10::Stream&) override {}
  void keep_until_here(const at::Tensor&, const c10::Stream&) const override {}
  void enqueued(Engine& engine, const c10::Stream& stream) const override { engine.synchronize(handle(stream)); }
};

}  // namespace

bool reached(const c10::Event& event) {
  static const auto exchange_mode = driver_function<int (*)(int* mode)>("cuThreadExchangeStreamCaptureMode");
  int mode = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED; after the first exchange the thread's own mode
  const auto exchange = [&mode] {
    if (exchange_mode) exchange_mode(&mode);
  };
  exchange();
  const ScopeExit restore(exchange);
  return event.query();
}

void await(const c10::Event& event) {
  for (int look = 0; !reached(event); ++look) {
    if (look < 1000)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

bool captures(c10::Device device) { return is_capturing(c10::impl::VirtualGuardImpl(device.type()).getStream(device)); }

std::shared_ptr<Streams> device_streams(c10::Device device, std::shared_ptr<Engine> engine) {
  return std::make_shared<DeviceStreams>(device, std::move(engine));
}
std::shared_ptr<Streams> host_streams() { return std::make_shared<HostStreams>(); }

}  // namespace ringcomm
