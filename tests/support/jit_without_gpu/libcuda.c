/* A CUDA driver without a GPU: modules load, launches are checked against the limits of the device and counted, and
   nothing runs. Attributes of the device are set from outside. */

#include <cuda.h>
#include <string.h>

enum { NUM_ATTRIBUTES = 256 };

int device_attributes[NUM_ATTRIBUTES];
long num_launches = 0;
long num_overlapping = 0;

static unsigned long handles = 0;

static void *new_handle(void) { return (void *)++handles; }

static unsigned limit(int attribute) { return (unsigned)device_attributes[attribute]; }

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }

CUresult cuDriverGetVersion(int *version) {
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    *count = 1;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    if (attribute < 0 || attribute >= NUM_ATTRIBUTES)
        return CUDA_ERROR_INVALID_VALUE;
    *value = device_attributes[attribute];
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = new_handle();
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    static void *current;
    if (!current)
        current = new_handle();
    *context = current;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }

CUresult cuCtxGetDevice(CUdevice *device) {
    *device = 0;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetLimit(size_t *value, CUlimit which) {
    *value = 0;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(CUlimit which, size_t value) { return CUDA_SUCCESS; }

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    *module = new_handle();
    return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    *function = new_handle();
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
                 ? device_attributes[CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK]
                 : 0;
    return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    int most = device_attributes[CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN];
    return attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES && value > most ? CUDA_ERROR_INVALID_VALUE
                                                                                       : CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }

CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) {
    *count = 1;
    return CUDA_SUCCESS;
}

/* Addresses are offsets into tensors without memory, and good ones. */
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
    memcpy(data, &pointer, sizeof pointer);
    return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error == CUDA_ERROR_INVALID_VALUE ? "invalid argument" : "unknown error";
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
    int fits = function && parameters && config->gridDimX && config->gridDimY && config->gridDimZ &&
               config->gridDimX <= limit(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X) &&
               config->gridDimY <= limit(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y) &&
               config->gridDimZ <= limit(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z) &&
               config->blockDimX <= limit(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK) &&
               config->sharedMemBytes <= limit(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
    if (!fits)
        return CUDA_ERROR_INVALID_VALUE;
    num_launches++;
    for (unsigned i = 0; i < config->numAttrs; i++)
        num_overlapping += config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION &&
                           config->attrs[i].value.programmaticStreamSerializationAllowed;
    return CUDA_SUCCESS;
}
