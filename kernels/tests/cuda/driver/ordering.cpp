// Entry points for streams and events.
#include "device.h"

using namespace driver;

extern "C" int cuStreamCreate(void** out, unsigned flags) {
  ENTRY("cuStreamCreate");
  auto stream = std::make_shared<Stream>();
  stream->is_blocking = !(flags & 1);
  dev.streams.push_back(stream);
  *out = stream.get();
  return kSuccess;
}

extern "C" int cuStreamCreateWithPriority(void** out, unsigned flags, int) { return cuStreamCreate(out, flags); }

extern "C" int cuStreamDestroy_v2(void* handle) {
  ENTRY("cuStreamDestroy_v2");
  for (size_t i = 0; i < dev.streams.size(); i++) {
    std::shared_ptr<Stream> stream = dev.streams[i];
    if (stream.get() != handle) continue;
    advance_until(dev, [&] { return stream->queue.empty(); });
    dev.streams.erase(dev.streams.begin() + static_cast<ptrdiff_t>(i));
    return kSuccess;
  }
  return kInvalidHandle;
}

extern "C" int cuStreamSynchronize(void* handle) {
  ENTRY("cuStreamSynchronize");
  std::shared_ptr<Stream> stream = find_stream(dev, handle);
  if (!stream) return kInvalidHandle;
  if (stream->capture) {
    stream->capture->invalidated = true;
    return kCaptureUnsupported;
  }
  uint64_t operation = stream->submitted;
  advance_until(dev, [&] { return stream->done >= operation; });
  return dev.sticky.code;
}

extern "C" int cuStreamQuery(void* handle) {
  ENTRY("cuStreamQuery");
  std::shared_ptr<Stream> stream = find_stream(dev, handle);
  if (!stream) return kInvalidHandle;
  if (stream->capture) {
    stream->capture->invalidated = true;
    return kCaptureUnsupported;
  }
  advance(dev);
  return stream->queue.empty() ? dev.sticky.code : kNotReady;
}

extern "C" int cuEventCreate(void** out, unsigned) {
  ENTRY("cuEventCreate");
  auto* event = new Event;
  dev.events.insert(event);
  *out = event;
  return kSuccess;
}

extern "C" int cuEventDestroy_v2(void* handle) {
  ENTRY("cuEventDestroy_v2");
  auto* event = static_cast<Event*>(handle);
  if (!dev.events.erase(event)) return kInvalidHandle;
  delete event;
  return kSuccess;
}

extern "C" int cuEventRecord(void* handle, void* stream_handle) {
  ENTRY("cuEventRecord");
  auto* event = static_cast<Event*>(handle);
  std::shared_ptr<Stream> stream = find_stream(dev, stream_handle);
  if (!stream || !dev.events.count(event)) return kInvalidHandle;
  event->capture = stream->capture;
  event->captured_after = stream->tail;
  event->mark = stream->capture ? Mark{} : Mark{stream, stream->submitted};
  return kSuccess;
}

extern "C" int cuStreamWaitEvent(void* stream_handle, void* handle, unsigned) {
  ENTRY("cuStreamWaitEvent");
  auto* event = static_cast<Event*>(handle);
  std::shared_ptr<Stream> stream = find_stream(dev, stream_handle);
  if (!stream || !dev.events.count(event)) return kInvalidHandle;
  if (event->capture) {
    if (stream->capture && stream->capture != event->capture) return kCaptureIsolation;
    if (!stream->capture) {
      if (stream == dev.null_stream) return kCaptureImplicit;
      stream->capture = event->capture;
      stream->tail.clear();
    }
    stream->tail.insert(stream->tail.end(), event->captured_after.begin(), event->captured_after.end());
    return kSuccess;
  }
  if (stream->capture) {
    if (!event->mark.stream) return kSuccess;
    stream->capture->invalidated = true;
    return kCaptureIsolation;
  }
  if (event->mark.stream) stream->pending.push_back(event->mark);
  return kSuccess;
}

extern "C" int cuEventQuery(void* handle) {
  ENTRY("cuEventQuery");
  auto* event = static_cast<Event*>(handle);
  if (!dev.events.count(event)) return kInvalidHandle;
  if (event->capture) return kCapturedEvent;
  advance(dev);
  return is_done(event->mark) ? dev.sticky.code : kNotReady;
}

extern "C" int cuEventSynchronize(void* handle) {
  ENTRY("cuEventSynchronize");
  auto* event = static_cast<Event*>(handle);
  if (!dev.events.count(event)) return kInvalidHandle;
  if (event->capture) return kCapturedEvent;
  Mark mark = event->mark;
  advance_until(dev, [&] { return is_done(mark); });
  return dev.sticky.code;
}

extern "C" int cuEventElapsedTime_v2(float* milliseconds, void* start, void* end) {
  ENTRY("cuEventElapsedTime_v2");
  for (void* handle : {start, end}) {
    auto* event = static_cast<Event*>(handle);
    if (!dev.events.count(event)) return kInvalidHandle;
    if (!is_done(event->mark)) return kNotReady;
  }
  *milliseconds = 1;
  return kSuccess;
}

extern "C" int cuLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
  ENTRY("cuLaunchHostFunc");
  return submit(dev, stream, "host function", [=](Device&) {
    function(data);
    return host::Fault{};
  });
}
