// What Triton's C code asks of libcuda.so.1, without a GPU: a launch is recorded, no more.
#include "cuda.h"
#include <stdint.h>
#include <string.h>

// Of up to 8 launches in turn:
int parameters[8];           // how many, set before the launch; 0 where none is recorded
int sizes[8][96];            // bytes of each, set before the launch
char values[8][96][128];     // what was passed
uint64_t launch[8][10];      // grid, block, shared memory, stream, function, may start early
int launches = 0;            // since it was set to 0
int encodings = 0;

CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **params, void **extra) {
  uint64_t what[10] = {c->gridDimX,  c->gridDimY,       c->gridDimZ,
                       c->blockDimX, c->blockDimY,      c->blockDimZ,
                       c->sharedMemBytes, (uint64_t)c->hStream, (uint64_t)f};
  for (unsigned i = 0; i < c->numAttrs; i++)
    if (c->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
      what[9] = c->attrs[i].value.programmaticStreamSerializationAllowed;
  int n = launches++ % 8;
  memcpy(launch[n], what, sizeof what);
  for (int i = 0; i < parameters[n]; i++)
    memcpy(values[n][i], params[i], sizes[n][i]);
  return CUDA_SUCCESS;
}

// The arguments in the order of the call stand for the driver's own encoding.
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                                void *address, const cuuint64_t *shape, const cuuint64_t *strides,
                                const cuuint32_t *box, const cuuint32_t *steps,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion l2, CUtensorMapFloatOOBfill fill) {
  uint32_t *word = (uint32_t *)map;
  memset(map, 0, sizeof *map);
  *(uint64_t *)word = (uint64_t)address;
  uint32_t settings[] = {type, rank, interleave, swizzle, l2, fill};
  memcpy(word + 2, settings, sizeof settings);
  for (unsigned i = 0; i < rank; i++) {
    word[8 + i] = shape[i];
    word[13 + i] = box[i];
    word[18 + i] = steps[i];
    if (i + 1 < rank)
      word[23 + i] = strides[i];
  }
  encodings++;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *v, CUfunction_attribute a, CUfunction f) {
  *v = a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice d) {
  *v = 227 << 10;  // shared memory of a block; nothing else is asked
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *to, CUpointer_attribute a, CUdeviceptr p) {
  *(CUdeviceptr *)to = p;
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name) {
  static uintptr_t functions = 0;
  *f = (CUfunction)++functions;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult e, const char **s) { *s = "fake"; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *c) { *c = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *d) { *d = 0; return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *v, CUlimit l) { *v = 0; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext c) { return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit l, size_t v) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *d, int i) { *d = i; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { *c = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *v) { *v = 13000; return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache c) { return CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule *m, const void *image) { *m = (CUmodule)1; return CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule m) { return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus *v) { *v = 0; return CUDA_SUCCESS; }
