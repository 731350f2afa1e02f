// The emulated GPU and its runtime API, with small kernels: streams, events, host functions, devices, graphs. All of it
// twice: the second process switches threads at every access.
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "cpp/emulator/tools.h"

namespace ringcomm::test {
namespace {

struct AddArgs {
  long* values;
  long count, factor, term;
};
__global__ void multiply_add(AddArgs args) {
  const long stride = static_cast<long>(gridDim.x) * blockDim.x;
  for (long i = static_cast<long>(blockIdx.x) * blockDim.x + threadIdx.x; i < args.count; i += stride)
    put(&args.values[i], get(&args.values[i]) * args.factor + args.term);
}
cudaError_t multiply_add_on(cudaStream_t stream, long* values, long count, long factor, long term) {
  return emulator::launch(multiply_add, "multiply_add", dim3(4), dim3(32), AddArgs{values, count, factor, term}, stream,
                          false);
}

void copies_and_kernels() {
  constexpr long kCount = 1000;
  long* const on_device = device_memory<long>(kCount);
  std::vector<long> values(kCount);
  for (long i = 0; i < kCount; ++i) values[i] = i;
  for (cudaStream_t stream : {static_cast<cudaStream_t>(nullptr), new_stream()}) {
    check(cudaMemcpyAsync(on_device, values.data(), kCount * sizeof(long), cudaMemcpyHostToDevice, stream), "copy");
    check(multiply_add_on(stream, on_device, kCount, 2, 1), "launch");
    std::vector<long> result(kCount);
    check(cudaMemcpyAsync(result.data(), on_device, kCount * sizeof(long), cudaMemcpyDeviceToHost, stream), "copy");
    check(cudaStreamSynchronize(stream), "synchronize");
    require(cudaStreamQuery(stream) == cudaSuccess, "a synchronized stream is idle");
    for (long i = 0; i < kCount; ++i) require(result[i] == 2 * i + 1, "a stream keeps its order", i);
    if (stream) check(cudaStreamDestroy(stream), "destroy");
  }
  check(cudaFree(on_device), "free");
}

void streams_run_together() {
  Word* const flags = device_memory<Word>(2);
  cudaStream_t one = new_stream(), two = new_stream();
  for (int round = 0; round < 20; ++round) {
    check(cudaMemset(flags, 0, 2 * sizeof(Word)), "clear");
    check(emulator::launch(handshake, "one", dim3(1), dim3(8), PairArgs{flags, flags + 1}, one, true), "launch");
    check(emulator::launch(handshake, "two", dim3(1), dim3(8), PairArgs{flags + 1, flags}, two, true), "launch");
    check(cudaStreamSynchronize(one), "synchronize");
    check(cudaStreamSynchronize(two), "synchronize");
  }
  check(cudaStreamDestroy(one), "destroy");
  check(cudaStreamDestroy(two), "destroy");
  check(cudaFree(flags), "free");
}

void events_order_streams() {
  constexpr long kCount = 300;
  long* const values = device_memory<long>(kCount);
  cudaStream_t streams[] = {new_stream(), new_stream(), new_stream()};
  cudaEvent_t event = new_event();
  require(cudaEventQuery(event) == cudaSuccess, "an event never recorded has happened");
  for (long step = 0; step < 30; ++step) {
    check(multiply_add_on(streams[step % 3], values, kCount, 3, step), "launch");
    check(cudaEventRecord(event, streams[step % 3]), "record");
    check(cudaStreamWaitEvent(streams[(step + 1) % 3], event), "wait");
  }
  check(cudaEventSynchronize(event), "synchronize");
  unsigned long want = 0;
  for (unsigned long step = 0; step < 30; ++step) want = want * 3 + step;
  for (long i = 0; i < kCount; ++i) require(values[i] == static_cast<long>(want), "events order streams", i);
  for (cudaStream_t stream : streams) check(cudaStreamDestroy(stream), "destroy");
  check(cudaEventDestroy(event), "destroy");
  check(cudaFree(values), "free");
}

void a_wait_is_for_the_record_before_it() {
  Word* const words = device_memory<Word>(3);
  long* const value = device_memory<long>(1);
  cudaStream_t slow = new_stream(), fast = new_stream(), waiting = new_stream();
  cudaEvent_t event = nullptr, begin = nullptr;
  check(cudaEventCreate(&event), "create");
  check(cudaEventCreate(&begin), "create");
  check(cudaEventRecord(begin, slow), "record");
  check(emulator::launch(waits_in_vain, "slow", dim3(1), dim3(2), AbortArgs{words, words + 1, words + 2, kFar}, slow,
                         false),
        "launch");
  check(cudaEventRecord(event, slow), "record");
  check(cudaStreamWaitEvent(waiting, event), "wait");
  check(multiply_add_on(waiting, value, 1, 1, 7), "launch");
  check(cudaEventRecord(event, fast), "record again");
  check(cudaEventSynchronize(event), "the second record does not wait");
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  require(cudaStreamQuery(waiting) == cudaErrorNotReady, "a wait is for the record before it");
  check(cudaEventRecord(event, slow), "record");
  float ms = 0;
  require(cudaEventElapsedTime(&ms, begin, event) == cudaErrorNotReady, "not yet");
  __atomic_store_n(words + 1, 1, __ATOMIC_RELEASE);
  check(cudaStreamSynchronize(waiting), "synchronize");
  require(*value == 7, "the kernel behind the wait");
  check(cudaEventSynchronize(event), "synchronize");
  check(cudaEventElapsedTime(&ms, begin, event), "time");
  require(ms >= 5, "the time between two events", static_cast<long>(ms));
  for (cudaStream_t s : {slow, fast, waiting}) check(cudaStreamDestroy(s), "destroy");
  for (cudaEvent_t e : {event, begin}) check(cudaEventDestroy(e), "destroy");
  check(cudaFree(words), "free");
  check(cudaFree(value), "free");
  cudaGetLastError();
}

void legacy_stream_waits() {
  long* const value = device_memory<long>(1);
  cudaStream_t blocking = nullptr;
  check(cudaStreamCreate(&blocking), "create");
  for (int i = 0; i < 10; ++i) {
    check(multiply_add_on(blocking, value, 1, 2, 1), "launch");
    check(multiply_add_on(nullptr, value, 1, 3, 1), "launch");
  }
  long got = 0, want = 0;
  check(cudaMemcpy(&got, value, sizeof got, cudaMemcpyDeviceToHost), "copy");
  for (int i = 0; i < 10; ++i) want = (want * 2 + 1) * 3 + 1;
  require(got == want, "stream 0 and blocking streams wait for each other", got);
  check(cudaStreamDestroy(blocking), "destroy");
  check(cudaFree(value), "free");
}

void host_stops_a_kernel() {
  Word* words = nullptr;
  check(cudaHostAlloc(&words, 3 * sizeof(Word), cudaHostAllocMapped), "allocate");
  Word* mapped = nullptr;
  check(cudaHostGetDevicePointer(&mapped, words, 0), "map");
  std::memset(words, 0, 3 * sizeof(Word));
  cudaStream_t stream = new_stream();
  check(emulator::launch(waits_in_vain, "waits_in_vain", dim3(1), dim3(2),
                         AbortArgs{mapped, mapped + 1, mapped + 2, kFar}, stream, false),
        "launch");
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  require(cudaStreamQuery(stream) == cudaErrorNotReady, "the kernel spins");
  require(cudaGetLastError() == cudaErrorNotReady && cudaGetLastError() == cudaSuccess, "the last error, once");
  __atomic_store_n(words + 1, 1, __ATOMIC_RELEASE);
  check(cudaStreamSynchronize(stream), "synchronize");
  require(words[2] > 0, "sleeping threads look now and then", static_cast<long>(words[2]));
  check(cudaStreamDestroy(stream), "destroy");
  check(cudaFreeHost(words), "free");
}

void host_functions() {
  struct Shared {
    std::atomic<bool> go{false};
    long value = 0;
    Word* flag;
  } shared;
  shared.flag = device_memory<Word>(2);
  cudaStream_t stream = new_stream(), other = new_stream();
  const auto blocks = [](void* p) {  // waits for the host, while kernels of other streams go on
    auto& s = *static_cast<Shared*>(p);
    while (!s.go.load()) std::this_thread::yield();
    s.value = 42;
  };
  check(cudaLaunchHostFunc(stream, blocks, &shared), "host function");
  check(multiply_add_on(stream, &shared.value, 1, 2, 0), "launch");
  long* const value = device_memory<long>(1);
  check(multiply_add_on(other, value, 1, 1, 5), "launch");
  check(cudaStreamSynchronize(other), "synchronize");
  require(*value == 5 && cudaStreamQuery(stream) == cudaErrorNotReady, "a host function holds up its stream alone");
  shared.go = true;
  check(cudaStreamSynchronize(stream), "synchronize");
  require(shared.value == 84, "a host function runs in its turn", shared.value);
  for (cudaStream_t s : {stream, other}) check(cudaStreamDestroy(s), "destroy");
  check(cudaFree(shared.flag), "free");
  check(cudaFree(value), "free");
  cudaGetLastError();
}

__global__ void ends_at_once(int) {}
void launches_are_checked() {
  int sms = 0, per_sm = 0;
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0), "attribute");
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, reinterpret_cast<const void*>(&ends_at_once), 128, 0),
        "occupancy");
  const auto most = static_cast<unsigned>(sms * per_sm);
  check(emulator::launch(ends_at_once, "most", dim3(most), dim3(128), 0, nullptr, true), "as many as fit");
  require(emulator::launch(ends_at_once, "more", dim3(most + 1), dim3(128), 0, nullptr, true) ==
              cudaErrorCooperativeLaunchTooLarge,
          "a cooperative launch that does not fit is refused");
  check(emulator::launch(ends_at_once, "more", dim3(most + 3), dim3(128), 0, nullptr, false), "others wait for room");
  require(
      emulator::launch(ends_at_once, "large", dim3(1), dim3(1025), 0, nullptr, false) == cudaErrorInvalidConfiguration,
      "1024 threads at most");
  require(cudaStreamSynchronize(reinterpret_cast<cudaStream_t>(&sms)) == cudaErrorInvalidResourceHandle, "no stream");
  require(cudaSetDevice(7) == cudaErrorInvalidDevice, "no such device");
  check(cudaDeviceSynchronize(), "synchronize");
  cudaGetLastError();
}

void devices_and_peers() {
  int count = 0, can = 0, device = -1;
  check(cudaGetDeviceCount(&count), "count");
  require(count == 2, "two devices, as asked for", count);
  check(cudaDeviceCanAccessPeer(&can, 0, 1), "peer");
  require(can == 1, "devices see each other");
  check(cudaDeviceEnablePeerAccess(1, 0), "enable");
  require(cudaDeviceEnablePeerAccess(1, 0) == cudaErrorPeerAccessAlreadyEnabled, "enabled once");
  Word* const flags = device_memory<Word>(2);
  cudaStream_t here = new_stream();
  check(emulator::launch(handshake, "here", dim3(1), dim3(4), PairArgs{flags, flags + 1}, here, true), "launch");
  std::thread([&] {  // the current device is the thread's
    check(cudaGetDevice(&device), "device");
    require(device == 0, "a thread begins with device 0", device);
    check(cudaSetDevice(1), "device 1");
    cudaStream_t there = new_stream();
    require(emulator::launch(handshake, "wrong", dim3(1), dim3(4), PairArgs{}, here, true) ==
                cudaErrorInvalidResourceHandle,
            "a stream of another device");
    check(emulator::launch(handshake, "there", dim3(1), dim3(4), PairArgs{flags + 1, flags}, there, true), "launch");
    check(cudaStreamSynchronize(there), "synchronize");
    check(cudaStreamDestroy(there), "destroy");
    Word* const mine = device_memory<Word>(1);
    cudaPointerAttributes attributes;
    check(cudaPointerGetAttributes(&attributes, mine), "attributes");
    require(attributes.type == cudaMemoryTypeDevice && attributes.device == 1, "memory of device 1", attributes.device);
    check(cudaPointerGetAttributes(&attributes, flags), "attributes");
    require(attributes.device == 0, "memory of device 0", attributes.device);
    check(cudaFree(mine), "free");
  })
      .join();
  check(cudaStreamSynchronize(here), "synchronize");
  check(cudaStreamDestroy(here), "destroy");
  check(cudaFree(flags), "free");
  cudaGetLastError();
}

struct Forked {  // two branches that meet on flags: they must run side by side in a replay too
  cudaStream_t stream = new_stream(), side = new_stream();
  cudaEvent_t fork = new_event(), join = new_event();
  Word* flags = device_memory<Word>(2);
  long* values = device_memory<long>(200);

  void capture(bool joined) {
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "begin");
    check(cudaMemsetAsync(flags, 0, 2 * sizeof(Word), stream), "clear");
    check(multiply_add_on(stream, values, 100, 2, 1), "capture");
    check(cudaEventRecord(fork, stream), "fork");
    check(cudaStreamWaitEvent(side, fork), "fork");
    check(emulator::launch(handshake, "one", dim3(1), dim3(4), PairArgs{flags, flags + 1}, stream, true), "capture");
    check(emulator::launch(handshake, "two", dim3(1), dim3(4), PairArgs{flags + 1, flags}, side, true), "capture");
    check(multiply_add_on(side, values + 100, 100, 3, 2), "capture");
    check(cudaEventRecord(join, side), "join");
    if (joined) check(cudaStreamWaitEvent(stream, join), "join");
  }
  ~Forked() {
    for (cudaStream_t s : {stream, side}) check(cudaStreamDestroy(s), "destroy");
    for (cudaEvent_t e : {fork, join}) check(cudaEventDestroy(e), "destroy");
    check(cudaFree(values), "free");
    check(cudaFree(flags), "free");
  }
};

void captures_are_checked() {
  Forked f;
  cudaGraph_t graph = nullptr;
  f.capture(false);
  require(cudaStreamEndCapture(f.stream, &graph) == cudaErrorStreamCaptureUnjoined && !graph, "a branch is not joined");
  f.capture(true);
  cudaStreamCaptureStatus status;
  unsigned long long id = 0;
  check(cudaStreamGetCaptureInfo(f.side, &status, &id), "capture info");
  require(status == cudaStreamCaptureStatusActive && id != 0, "the side stream has joined the capture");
  require(cudaStreamSynchronize(f.side) == cudaErrorStreamCaptureUnsupported, "nothing to wait for in a capture");
  check(cudaStreamIsCapturing(f.stream, &status), "capture status");
  require(status == cudaStreamCaptureStatusInvalidated, "which spoils the capture");
  require(cudaStreamEndCapture(f.stream, &graph) == cudaErrorStreamCaptureInvalidated && !graph, "a spoilt capture");
  f.capture(true);
  void* memory = nullptr;
  require(cudaMalloc(&memory, 8) == cudaErrorStreamCaptureUnsupported, "no allocation by the capturing thread");
  require(cudaStreamEndCapture(f.stream, &graph) == cudaErrorStreamCaptureInvalidated, "a spoilt capture");
  require(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeRelaxed) == cudaErrorStreamCaptureUnsupported,
          "stream 0 cannot be captured");
  check(cudaDeviceSynchronize(), "synchronize");
  require(f.values[0] == 0, "capture runs nothing", f.values[0]);
  cudaGetLastError();
}

void graphs_replay() {
  Forked f;
  cudaGraph_t graph = nullptr;
  f.capture(true);
  check(cudaStreamEndCapture(f.stream, &graph), "end");
  std::size_t nodes = 0;
  check(cudaGraphGetNodes(graph, nullptr, &nodes), "nodes");
  require(nodes == 5, "one memset and four kernels", static_cast<long>(nodes));
  cudaGraphExec_t exec = nullptr;
  check(cudaGraphInstantiate(&exec, graph), "instantiate");
  check(cudaGraphDestroy(graph), "destroy");
  long first = 0, second = 0;
  for (int i = 0; i < 10; ++i) {
    check(cudaGraphLaunch(exec, i % 2 ? f.stream : f.side), "launch");
    first = first * 2 + 1;
    second = second * 3 + 2;
  }
  check(cudaDeviceSynchronize(), "synchronize");
  for (long i = 0; i < 100; ++i)
    require(f.values[i] == first && f.values[100 + i] == second, "a graph replays what was captured", i);
  check(cudaGraphExecDestroy(exec), "destroy");
}

}  // namespace
}  // namespace ringcomm::test

int main(int argc, char** argv) {
  using namespace ringcomm::test;
  const std::string part = argc > 1 ? argv[1] : "";
  choose_devices();
  copies_and_kernels();
  streams_run_together();
  events_order_streams();
  a_wait_is_for_the_record_before_it();
  legacy_stream_waits();
  host_stops_a_kernel();
  host_functions();
  launches_are_checked();
  devices_and_peers();
  captures_are_checked();
  graphs_replay();
  if (part != "preempted")
    require(exit_code(start("preempted", "", "RINGCOMM_EMULATED_PREEMPT")) == 0, "the same, with other schedules");
  std::printf("emulator_gpu_test passed\n");
}
