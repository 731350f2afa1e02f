// Stream capture and graphs. A graph is the list of captured work, each item with its branch, which is a stream that
// the capture had forked. A launch puts branch 0 into its own stream, and the others into streams of the graph.
#include <algorithm>
#include <atomic>

#include "gpu.h"

struct CUgraph_st {
  std::vector<ringcomm::emulator::Capture::Node> nodes;
  int num_events = 0;
};
struct CUgraphExec_st {
  CUgraph_st graph;
  std::vector<ringcomm::emulator::Stream*> branches;  // of the graph's own, from branch 1 on
  std::shared_ptr<ringcomm::emulator::Point> done;    // of the last launch
};

namespace ringcomm::emulator {
namespace {

std::vector<std::shared_ptr<Capture>>& captures() {  // that go on
  static auto* const all = new std::vector<std::shared_ptr<Capture>>;
  return *all;
}
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

cudaError_t spoil(Capture& capture, cudaError_t error) {
  capture.invalid = true;
  return error;
}
Stream* own_branch(Gpu& gpu, CUgraphExec_st& exec, int branch, int device) {
  while (static_cast<int>(exec.branches.size()) < branch)
    exec.branches.push_back(gpu.create_stream(device, cudaStreamNonBlocking));
  return exec.branches[branch - 1];
}
void end(const std::shared_ptr<Capture>& capture) {
  capture->active = false;
  for (Stream* stream : capture->streams)
    if (stream) stream->capture = nullptr;
  auto& all = captures();
  all.erase(std::remove(all.begin(), all.end(), capture), all.end());
}

}  // namespace

bool Capture::joined() const {
  // Backwards from the end of branch 0: what a wait depends on is the branch of its event up to the record.
  std::vector<int> reached(streams.size(), -1);  // by branch: last node known to happen before the end
  std::vector<int> record_of(num_events, -1);
  for (int i = 0; i < static_cast<int>(nodes.size()); ++i) {
    if (nodes[i].work.kind == Kind::kRecord) record_of[nodes[i].work.captured_event] = i;
    if (nodes[i].branch == 0) reached[0] = i;
  }
  for (int i = static_cast<int>(nodes.size()); i-- > 0;) {
    const Node& node = nodes[i];
    const bool happens_before = i <= reached[node.branch];
    if (node.work.kind == Kind::kWait && happens_before) {
      const int record = record_of[node.work.captured_event];
      int& branch = reached[nodes[record].branch];
      branch = std::max(branch, record);
    }
    const bool works = node.work.kind != Kind::kWait && node.work.kind != Kind::kRecord;
    if (works && !happens_before) return false;
  }
  return true;
}

cudaError_t forbid_in_capture() {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  for (const auto& capture : captures()) {
    const bool mine = capture->owner == std::this_thread::get_id();
    if (capture->mode == cudaStreamCaptureModeRelaxed) continue;
    if (!mine && (capture->mode == cudaStreamCaptureModeThreadLocal || thread_mode != cudaStreamCaptureModeGlobal))
      continue;
    return spoil(*capture, cudaErrorStreamCaptureUnsupported);
  }
  return cudaSuccess;
}
cudaError_t forbid_in_capture(Stream* stream) {
  return stream->capture ? spoil(*stream->capture, cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}
void leave_capture(Stream* stream) {
  if (!stream->capture) return;
  const auto capture = stream->capture;
  spoil(*capture, cudaErrorStreamCaptureInvalidated);
  capture->streams[stream->branch] = nullptr;
  if (capture->origin == stream) end(capture);
  stream->capture = nullptr;
}

cudaError_t submit(Gpu& gpu, Stream* stream, Work work) {
  if (!stream->capture) {
    if (stream->legacy)
      for (const auto& capture : captures())  // the legacy stream would wait for a capturing stream
        if (capture->origin->device == stream->device && capture->origin->blocking())
          return spoil(*capture, cudaErrorStreamCaptureImplicit);
    gpu.enqueue(stream, work);
    return cudaSuccess;
  }
  if (stream->capture->invalid) return cudaErrorStreamCaptureInvalidated;
  stream->capture->nodes.push_back({stream->branch, std::move(work)});
  return cudaSuccess;
}

cudaError_t record(Gpu& gpu, const std::shared_ptr<EventState>& event, Stream* stream) {
  event->capture = stream->capture;
  Work work{Kind::kRecord};
  if (stream->capture)
    work.captured_event = event->captured_as = stream->capture->num_events++;
  else
    work.point = event->last = std::make_shared<Point>();
  return submit(gpu, stream, std::move(work));
}

cudaError_t wait_event(Gpu& gpu, Stream* stream, const std::shared_ptr<EventState>& event) {
  Work work{Kind::kWait};
  const auto capture = event->capture;
  if (!capture) {
    if (stream->capture) return spoil(*stream->capture, cudaErrorStreamCaptureIsolation);
    if (!event->last) return cudaSuccess;
    work.point = event->last;
    return submit(gpu, stream, std::move(work));
  }
  if (!capture->active) return cudaErrorCapturedEvent;
  if (stream->legacy) return spoil(*capture, cudaErrorStreamCaptureImplicit);
  if (stream->capture && stream->capture != capture) return spoil(*capture, cudaErrorStreamCaptureMerge);
  if (!stream->capture) {  // it joins
    stream->capture = capture;
    stream->branch = static_cast<int>(capture->streams.size());
    capture->streams.push_back(stream);
  }
  work.captured_event = event->captured_as;
  return submit(gpu, stream, std::move(work));
}

namespace {

cudaError_t begin_capture(Gpu& gpu, Stream* stream, cudaStreamCaptureMode mode) {
  (void)gpu;
  if (stream->legacy) return cudaErrorStreamCaptureUnsupported;
  if (stream->capture) return cudaErrorIllegalState;
  static std::atomic<unsigned long long> last{0};
  auto capture = std::make_shared<Capture>();
  capture->id = ++last;
  capture->mode = mode;
  capture->owner = std::this_thread::get_id();
  capture->origin = stream;
  capture->streams = {stream};
  stream->capture = capture;
  stream->branch = 0;
  captures().push_back(std::move(capture));
  return cudaSuccess;
}

cudaError_t end_capture(Stream* stream, cudaGraph_t* graph) {
  *graph = nullptr;
  const auto capture = stream->capture;
  if (!capture) return cudaErrorIllegalState;
  if (capture->origin != stream) return spoil(*capture, cudaErrorStreamCaptureUnmatched);
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->owner != std::this_thread::get_id())
    return cudaErrorStreamCaptureWrongThread;
  end(capture);
  if (capture->invalid) return cudaErrorStreamCaptureInvalidated;
  if (!capture->joined()) return cudaErrorStreamCaptureUnjoined;
  *graph = new CUgraph_st{std::move(capture->nodes), capture->num_events};
  return cudaSuccess;
}

// A graph does not overlap itself: each launch waits for the one before.
cudaError_t launch(Gpu& gpu, CUgraphExec_st& exec, Stream* stream) {
  if (stream->capture) return spoil(*stream->capture, cudaErrorStreamCaptureUnsupported);
  std::vector<std::shared_ptr<Point>> points(exec.graph.num_events);
  for (auto& point : points) point = std::make_shared<Point>();
  Work wait{Kind::kWait}, end{Kind::kRecord};
  wait.point = exec.done;
  if (wait.point) gpu.enqueue(stream, wait);
  for (const Capture::Node& node : exec.graph.nodes) {
    Stream* const branch = node.branch == 0 ? stream : own_branch(gpu, exec, node.branch, stream->device);
    if (node.work.captured_event < 0) {
      gpu.enqueue(branch, node.work);
      continue;
    }
    Work work{node.work.kind};
    work.point = points[node.work.captured_event];
    gpu.enqueue(branch, work);
  }
  end.point = exec.done = std::make_shared<Point>();
  gpu.enqueue(stream, end);
  return cudaSuccess;
}

// What all calls on streams do first.
template <typename Call>
cudaError_t with_stream(cudaStream_t handle, const Call& call) {
  if (const cudaError_t error = usable()) return note(error);
  Gpu& gpu = Gpu::get();
  std::lock_guard<std::mutex> lock(gpu.mutex);
  Stream* const stream = gpu.resolve(handle, current_device());
  return note(stream ? call(gpu, stream) : cudaErrorInvalidResourceHandle);
}

}  // namespace
}  // namespace ringcomm::emulator

using namespace ringcomm::emulator;

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  return with_stream(stream, [&](Gpu& gpu, Stream* s) { return begin_capture(gpu, s, mode); });
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  return with_stream(stream, [&](Gpu&, Stream* s) { return end_capture(s, graph); });
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(stream, status);
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id) {
  return with_stream(stream, [&](Gpu&, Stream* s) {
    *status = !s->capture           ? cudaStreamCaptureStatusNone
              : s->capture->invalid ? cudaStreamCaptureStatusInvalidated
                                    : cudaStreamCaptureStatusActive;
    if (id && *status == cudaStreamCaptureStatusActive) *id = s->capture->id;
    return cudaSuccess;
  });
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  count_call();
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  if (const cudaError_t error = usable()) return note(error);
  if (!exec || !graph) return note(cudaErrorInvalidValue);
  *exec = new CUgraphExec_st;
  (*exec)->graph = *graph;
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  return with_stream(stream, [&](Gpu& gpu, Stream* s) { return exec ? launch(gpu, *exec, s) : cudaErrorInvalidValue; });
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  if (const cudaError_t error = usable()) return note(error);
  if (!exec) return note(cudaErrorInvalidValue);
  Gpu& gpu = Gpu::get();
  std::lock_guard<std::mutex> lock(gpu.mutex);
  for (Stream* stream : exec->branches) gpu.destroy(stream);
  delete exec;
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, std::size_t* count) {
  if (!graph || !count || nodes) return note(cudaErrorInvalidValue);
  *count = std::count_if(graph->nodes.begin(), graph->nodes.end(), [](const Capture::Node& node) {
    return node.work.kind != Kind::kRecord && node.work.kind != Kind::kWait;
  });
  return cudaSuccess;
}
